"""CUDA C++ kernels without a GPU: they compile for Hopper as they should run there, the cache behaves, and the layout
of expert weights is the one the kernel's lanes decode. What they compute is tested where there is a GPU."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_plugin.kernels import cuda as provider
from deepinfer_plugin.kernels import providers
from deepinfer_plugin.kernels.cuda import (
    attention_cpp,
    experts,
    experts_fp8,
    fp8_linear,
    fp8_linear_fast,
    index,
    jit,
    linear,
    site,
    split,
)
from deepinfer_plugin.kernels.reference import formats

SHAPES = [
    ("scores, model", index.ScoresKernels(128, 32, 64, torch.bfloat16, True, True).scores),
    ("scores, odd shape", index.ScoresKernels(32, 5, 8, torch.float32, False, False).scores),
    ("groups", index.select_kernel(wide=False, block=0, held=8, vector=True)),
    ("blocks", index.select_kernel(wide=True, block=8, held=0, vector=False)),
]


def products(layout: ModuleType, tiling: experts.Tiling) -> jit.Kernel:
    """Of all 384 experts on one device."""
    tiles = torch.empty(384, 0, device="meta")
    one = layout.Product(tiles, tiles) if layout is experts_fp8 else layout.Product(tiles, tiles, nan_scales=False)
    return layout.kernel(experts.Experts(one, one, 5120, 2304), tiling, 6)[0]


SHAPES += [
    ("experts, few tokens", products(experts, experts.FEW)),
    ("experts, many tokens", products(experts, experts.MANY)),
    ("experts, fast, few tokens", products(experts_fp8, experts_fp8.FEW)),
    ("experts, fast, many tokens", products(experts_fp8, experts_fp8.MANY)),
]
SHAPES += [
    ("attention", attention_cpp.KERNEL),
    ("slots, eight ranks", split.kernel(384, 32, 8)),
    ("slots, many ranks", split.kernel(384, 128, 128)),
]
SHAPES += [("site", site.kernels(5120, True)[0]), ("site, first", site.kernels(5120, False)[0])]
for name, kind, mapped in (
    ("linear", fp8_linear.EXACT, False),
    ("linear without a cast", fp8_linear.EXACT, True),
    ("linear, fast", fp8_linear_fast.FAST, False),
):
    SHAPES += [
        (f"{name}, few rows", fp8_linear.kernels(kind, 8, False, mapped).product),
        (f"{name}, decode", fp8_linear.kernels(kind, 256, False, mapped).product),
        (f"{name}, prefill", fp8_linear.kernels(kind, kind.loops_width, True, mapped).product),
    ]
# Two sums in registers: what does not fit is kept from one split to the next, outside of the loop over channels.
MOST_SPILLED = {
    "linear, prefill": 256,
    "linear without a cast, prefill": 256,
    "experts, fast, many tokens": 32,
}
# Shared memory of a token in a stage: 128 channels.
TOKEN_BYTES = {"experts.cu": 256, "experts_fp8.cu": 128 + 4}


# What these read before they wait was not written by what may still run: weights; ids that a kernel before waited for.
READ_EARLY = {"enter", "combine"}


def read_before_waiting(code: bytes, folder: Path) -> list[str]:
    """Entries that read memory before the kernel before them has ended: the compiler may move a load over the wait."""
    (folder / "cubin").write_bytes(code)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    listing = subprocess.run([tool, "-sass", folder / "cubin"], capture_output=True, text=True, check=True).stdout
    parts = [part.partition("ACQBULK") for part in listing.split("Function : ")[1:]]
    return [before.split()[0] for before, wait, _ in parts if wait and "LDG" in before]


@pytest.mark.parametrize(("name", "kernel"), SHAPES, ids=[name for name, _ in SHAPES])
def test_compiles_for_hopper(name, kernel, tmp_path):
    code, report = jit.compile_source(kernel.source)
    assert code[:4] == b"\x7fELF" and kernel.entry.encode() in code
    assert set(read_before_waiting(code, tmp_path)) <= READ_EARLY
    assert "Potential Performance Loss" not in report, "wgmma would be serialised"
    spilled = [
        int(line.split("bytes spill stores")[0].split(",")[-1]) for line in report.splitlines() if "spill" in line
    ]
    assert spilled and max(spilled) <= MOST_SPILLED.get(name, 16), report
    static = [int(found) for found in re.findall(r"(\d+) bytes smem", report)]
    macros = dict(kernel.source.defines)
    dynamic = macros.get("SHARED_BYTES", 0)
    if token := TOKEN_BYTES.get(kernel.source.file, 0):
        tiles = 4 if kernel.source.file == "experts_fp8.cu" else macros["WARPGROUPS"]
        dynamic = macros["STAGES"] * (tiles * 4352 + macros["NMAX"] * token)
    elif kernel.source.file == "split.cu":
        dynamic = split.shared_bytes(macros["EXPERTS"])
    for kind in (fp8_linear.EXACT, fp8_linear_fast.FAST):
        if kernel.source.file == kind.file:
            dynamic = fp8_linear.kernels(kind, macros["WIDTH"], bool(macros["LOOPS"]), bool(macros["MAPPED"])).shared
    assert max(static, default=0) + dynamic <= jit.SHARED_BYTES, "what a block of Hopper has"


def test_a_kernel_that_does_not_compile_is_named():
    source = jit.Source("select.cu", (("BLOCK", 8), ("HELD", -1), ("VECTOR", 0), ("WIDE", 0)), ())
    with pytest.raises(jit.CompileError, match=r"select\.cu with .*'HELD': -1.*\n.*error"):
        jit.compile_source(source)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "deepinfer_plugin" / "kernels"


def test_the_cache_is_used(cache, monkeypatch):
    source = SHAPES[3][1].source
    assert not jit.cached(source)
    code = jit.cubin(source)
    assert jit.cached(source) and len(list(cache.iterdir())) == 1
    monkeypatch.setattr(jit, "compile_source", None)
    assert jit.cubin(source) == code


@pytest.mark.parametrize("keep", [0, 20, 1000, -1])
def test_a_cached_kernel_that_is_not_whole_is_compiled_again(cache, keep):
    """After a power cut, or a copy that broke off."""
    source = SHAPES[3][1].source
    code = jit.cubin(source)
    (path,) = cache.iterdir()
    path.write_bytes(path.read_bytes()[:keep])
    assert not jit.cached(source)
    assert jit.cubin(source) == code and jit.cached(source) and list(cache.iterdir()) == [path]


def test_another_specialisation_is_another_entry(cache):
    for held in (0, 1):
        jit.cubin(index.select_kernel(wide=False, block=0, held=held, vector=False).source)
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path):
    (tmp_path / "deepinfer_plugin").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit.cubin(SHAPES[3][1].source)[:4] == b"\x7fELF"


# ---- the layout of expert weights ------------------------------------------------------------------------------------


def unpack(product: experts.Product, expert: int) -> Tensor:
    """What the lanes of a warpgroup make of the tiles, with the bit operations of ``dequantise`` in experts.cu."""
    tiles = product.tiles[expert].transpose(1, 2).flatten(0, 1)
    row_tiles, channel_tiles, _ = tiles.shape
    words = (
        tiles[..., :4096].contiguous().view(torch.int32).view(row_tiles, channel_tiles, 2, 4, 8, 4, 4).to(torch.int64)
    )
    words &= 0xFFFFFFFF  # [.., half, warp, lane / 4, lane % 4, block]
    scales = tiles[..., 4096:].view(row_tiles, channel_tiles, 4, 2, 8, 1, 4).transpose(2, 3)  # the same order
    mask = 0x81C081C0
    pairs = torch.stack(
        (
            words & mask,
            words << 3 & mask,
            words << 6 & mask,
            words << 1 & 0x80008000 | words >> 5 & 0x01000100 | words >> 4 & 0x00C000C0,
        ),
        -1,
    )
    halves = torch.stack((pairs & 0xFFFF, pairs >> 16 & 0xFFFF), -1)  # [.., step and high, odd]
    values = torch.where(halves >= 1 << 15, halves - (1 << 16), halves).to(torch.int16).view(torch.bfloat16).double()
    factor = torch.exp2(scales.double() - 127).masked_fill(scales == 255, torch.nan)
    values = values * factor[..., None, None]
    values = values.unflatten(-2, (2, 2))  # row tile, channel tile, half, warp, eighth, owner, block, step, high, odd
    values = values.permute(0, 3, 2, 4, 1, 6, 7, 8, 5, 9)
    return values.reshape(row_tiles * 64, channel_tiles * 128) * product.factors[expert]


@pytest.mark.parametrize(("rows", "channels"), [(64, 128), (192, 160), (96, 320)])
def test_packed_weights_are_the_weights(rows, channels):
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (3, rows, channels // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(90, 128, (3, rows, channels // 32), dtype=torch.uint8, generator=generator)
    scales[1] += 20  # beyond what one factor holds
    scales[2, 5, 1] = 255
    order = torch.randperm(rows, generator=generator)
    packed = experts.pack(codes, scales.view(torch.float8_e8m0fnu), order)
    assert packed.nan_scales and packed.factors.tolist()[0] == 1 and packed.factors[1] > 1
    for expert in range(3):
        got, want = unpack(packed, expert), formats.mxfp4_dequant(codes[expert], scales[expert])[order].double()
        torch.testing.assert_close(got[:rows, :channels], want, rtol=0, atol=0, equal_nan=True)
        assert not got[rows:].any() and not got[:, channels:].any(), "padding is zero"


def test_scales_that_one_factor_cannot_hold_are_refused():
    codes = torch.full((2, 64, 64), 0x11, dtype=torch.uint8)
    scales = torch.full((2, 64, 4), 120, dtype=torch.uint8)
    scales[1, 3, 2], scales[1, 4, 0] = 250, 100
    with pytest.raises(ValueError, match=r"scales of experts \[1\] span more than 2\^126"):
        experts.pack(codes, scales.view(torch.float8_e8m0fnu), torch.arange(64))
    codes[1, 3, 32:48] = 0x80  # a block of zeros: its scale, however wild, is nobody's
    packed = experts.pack(codes, scales.view(torch.float8_e8m0fnu), torch.arange(64))
    want = formats.mxfp4_dequant(codes[1], scales[1]).double()
    torch.testing.assert_close(unpack(packed, 1)[:64, :128], want, rtol=0, atol=0)


@pytest.mark.parametrize("layout", [experts, experts_fp8], ids=["exact", "fast"])
def test_a_replaced_expert_is_packed_as_if_it_had_been_there(layout):
    generator, inner, hidden = torch.Generator().manual_seed(3), 96, 192
    shapes = ((3, 2 * inner, hidden), (3, hidden, inner))

    def drawn():
        codes = [torch.randint(256, (e, n, k // 2), generator=generator, dtype=torch.uint8) for e, n, k in shapes]
        scales = [
            torch.randint(110, 140, (e, n, k // 32), generator=generator, dtype=torch.uint8) for e, n, k in shapes
        ]
        return [part for c, s in zip(codes, scales, strict=True) for part in (c, s.view(torch.float8_e8m0fnu))]

    old, new = drawn(), drawn()
    prepared = layout.prepare_experts(*old)
    places = [
        part.data_ptr() for product in (prepared.gate_up, prepared.down) for part in (product.tiles, product.factors)
    ]
    layout.replace_expert(prepared, 1, *(part[1] for part in new))
    want = layout.prepare_experts(*(torch.stack([a[0], b[1], a[2]]) for a, b in zip(old, new, strict=True)))
    for product in ("gate_up", "down"):
        for part in ("tiles", "factors"):
            got = getattr(getattr(prepared, product), part)
            assert torch.equal(got, getattr(getattr(want, product), part)) and got.data_ptr() == places.pop(0)


@settings(max_examples=40, deadline=None)
@given(
    inner=st.integers(1, 5).map(lambda n: 32 * n),
    hidden=st.integers(1, 9).map(lambda n: 32 * n),
    lowest=st.integers(0, 254 - 126),
    span=st.integers(0, 126),
    seed=st.integers(0, 1 << 20),
)
def test_an_expert_that_is_read_is_the_one_that_was_packed(inner, hidden, lowest, span, seed):
    """Codes to the bit, scales of all blocks that are not zero. What is read is packed to the same bytes again."""
    generator, given_parts = torch.Generator().manual_seed(seed), []

    def drawn(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    for n, k in ((2 * inner, hidden), (hidden, inner)):
        codes, scales = drawn(0, 256, 2, n, k // 2), drawn(lowest, lowest + span + 1, 2, n, k // 32)
        zero, missing = (drawn(0, 4, *scales.shape) == 0 for _ in range(2))
        codes = torch.where(zero.repeat_interleave(16, -1), codes & 0x88, codes)
        scales = torch.where(zero, drawn(0, 255, *scales.shape), scales).masked_fill(missing, 255)
        given_parts += [codes, scales.view(torch.float8_e8m0fnu)]
    packed = experts.prepare_experts(*given_parts)
    again = experts.prepare_experts(
        *(torch.full_like(part.view(torch.uint8), 7).view(part.dtype) for part in given_parts)
    )
    for slot in range(2):
        read = experts.read_expert(packed, slot)
        for at in (0, 2):
            codes, scales = given_parts[at][slot], given_parts[at + 1][slot].view(torch.uint8)
            used = ((codes & 0x77) != 0).view(*scales.shape, 16).any(-1) | (scales == 255)
            assert torch.equal(read[at], codes)
            assert torch.equal(read[at + 1].view(torch.uint8)[used], scales[used])
            assert not (read[at + 1].view(torch.uint8)[~used] == 255).any()
        experts.replace_expert(again, slot, *read)
    for product in ("gate_up", "down"):
        for part in ("tiles", "factors"):
            assert torch.equal(getattr(getattr(again, product), part), getattr(getattr(packed, product), part))


def test_gate_and_up_rows_alternate_in_eights():
    inner, hidden = 96, 64
    w13 = torch.arange(2 * inner, dtype=torch.uint8)[None, :, None].repeat(1, 1, hidden // 2)
    s13 = torch.full((1, 2 * inner, 2), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    w2 = torch.zeros(1, hidden, inner // 2, dtype=torch.uint8)
    s2 = torch.full((1, hidden, 3), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    got = unpack(experts.prepare_experts(w13, s13, w2, s2).gate_up, 0)[: 2 * inner, :hidden]
    want = formats.mxfp4_dequant(w13[0], s13[0]).double()
    for tile in range(inner // 32):
        for warp in range(4):
            channels = slice(32 * tile + 8 * warp, 32 * tile + 8 * warp + 8)
            rows = 64 * tile + 16 * warp
            assert torch.equal(got[rows : rows + 8], want[:inner][channels])
            assert torch.equal(got[rows + 8 : rows + 16], want[inner:][channels])


# ---- the layout of the fast class ------------------------------------------------------------------------------------


def unpack_fp8(product: experts_fp8.Product, expert: int) -> Tensor:
    """What the lanes of a warpgroup make of the tiles, with the bit operations of ``dequantise`` in experts_fp8.cu."""
    tiles = product.tiles[expert].transpose(1, 2).flatten(0, 1)
    row_tiles, channel_tiles, _ = tiles.shape
    words = tiles[..., :4096].contiguous().view(torch.int32).view(row_tiles, channel_tiles, 2, 4, 8, 4, 4)
    words = words.to(torch.int64) & 0xFFFFFFFF  # [.., half, warp, lane / 4, lane % 4, block]
    scales = tiles[..., 4096:].view(row_tiles, channel_tiles, 4, 2, 8, 1, 4).transpose(2, 3).to(torch.int64)
    tables = 0x14100800 + scales * 0x08080800, 0x24201C18 + scales * 0x08080808
    table = torch.stack([half >> shift & 0xFF for half in tables for shift in (0, 8, 16, 24)], -1)
    table = (table & 0xFF).expand(*words.shape, 8)  # a missing scale gives anything, and a factor that is NaN
    magnitudes = torch.stack([words >> 4 * nibble & 7 for nibble in range(8)], -1)
    signs = torch.stack([(words << 4 * high) >> shift & 0x80 for high in range(2) for shift in (0, 8, 16, 24)], -1)
    values = (table.gather(-1, magnitudes) | signs).to(torch.uint8).view(torch.float8_e4m3fn).double()
    values = values.unflatten(-1, (2, 4))  # row tile, channel tile, half, warp, eighth, owner, block, high, code
    values = values.permute(0, 3, 2, 4, 1, 6, 7, 5, 8).reshape(row_tiles * 64, channel_tiles * 128)
    return values * product.factors[expert].double()[:, None]


@pytest.mark.parametrize(("rows", "channels"), [(256, 128), (192, 160), (96, 320)])
def test_fast_weights_are_the_weights(rows, channels):
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (3, rows, channels // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 12, (3, rows, channels // 32), dtype=torch.uint8, generator=generator)
    scales += torch.randint(0, 240, (3, rows, 1), dtype=torch.uint8, generator=generator)  # each row by itself
    codes[0, 3, :16], scales[0, 3, 0] = 0x80, 254  # a block of zeros: its scale, however wild, is nobody's
    scales[2, 5, 1] = 255
    order = torch.randperm(rows, generator=generator)
    packed = experts_fp8.pack(codes, scales.view(torch.float8_e8m0fnu), order)
    for expert in range(3):
        got, want = unpack_fp8(packed, expert), formats.mxfp4_dequant(codes[expert], scales[expert])[order].double()
        want[want.isnan().any(-1)] = torch.nan  # the whole row, also for the zeros behind it
        torch.testing.assert_close(got[:rows, :channels], want, rtol=0, atol=0, equal_nan=True)
        assert not got[rows:].any() and not got[:, channels:].nan_to_num(0).any(), "padding is zero"


@pytest.mark.parametrize("lowest", [0, 60, 230])
def test_fast_experts_that_are_read_are_the_ones_that_were_packed(lowest):
    """In values, where nothing is rounded; laid out again, what is read gives the same bytes even where it is."""
    generator, inner, hidden = torch.Generator().manual_seed(lowest), 96, 160
    for span in (12, 25):
        given_parts = []
        for rows, channels in ((2 * inner, hidden), (hidden, inner)):
            codes = torch.randint(256, (2, rows, channels // 2), generator=generator, dtype=torch.uint8)
            scales = torch.randint(
                lowest, lowest + span, (2, rows, channels // 32), generator=generator, dtype=torch.uint8
            )
            scales[0, 3, 1] = 255
            given_parts += [codes, scales.view(torch.float8_e8m0fnu)]
        packed = experts_fp8.prepare_experts(*given_parts)
        again = experts_fp8.prepare_experts(*(part.flip(0) for part in given_parts))
        for slot in range(2):
            read = experts_fp8.read_expert(packed, slot)
            if span == 12:
                for at in (0, 2):
                    got = formats.mxfp4_dequant(*read[at : at + 2])
                    want = formats.mxfp4_dequant(given_parts[at][slot], given_parts[at + 1][slot])
                    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            experts_fp8.replace_expert(again, slot, *read)
        for product in ("gate_up", "down"):
            for part in ("tiles", "factors"):
                got, want = (getattr(getattr(each, product), part).view(torch.uint8) for each in (again, packed))
                assert torch.equal(got, want)


def test_fast_weights_far_below_the_largest_are_rounded():
    """To the nearest of the grid of 2^-11 of the row's largest scale, ties to even codes."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (1, 256, 256), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 120, (1, 256, 16), dtype=torch.uint8, generator=generator)
    got = unpack_fp8(experts_fp8.pack(codes, scales.view(torch.float8_e8m0fnu), torch.arange(256)), 0)
    want = formats.mxfp4_dequant(codes[0], scales[0]).double()
    least = torch.exp2(scales[0].double().amax(-1, keepdim=True) - 127 - 11)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    grid = torch.cat((-grid[1:], grid))
    below = torch.exp2(scales[0].double() - 127).repeat_interleave(32, 1) < least
    assert below.any() and torch.equal(got[~below], want[~below])
    distance = (got - want).abs() / least
    nearest = (want[..., None] / least[..., None] - grid).abs().amin(-1)
    assert torch.equal(distance[below], nearest[below]) and distance.max() == 0.25
    ties = below & (want.abs() / least == 0.75)
    assert ties.any() and torch.equal(got[ties].abs(), least.expand_as(got)[ties])


# ---- the layout of FP8 weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "outputs", "channels"), [(1, 128, 64), (1, 100, 96), (1, 300, 320), (3, 160, 64)])
def test_packed_fp8_weights_are_the_weights(groups, outputs, channels):
    generator = torch.Generator().manual_seed(outputs)
    rows = groups * outputs
    codes = torch.randint(256, (rows, channels), dtype=torch.uint8, generator=generator)
    scale = torch.randint(1, 255, (-(-rows // 32), channels // 32), dtype=torch.uint8, generator=generator)
    scale = scale.view(torch.float8_e8m0fnu)
    packed = fp8_linear.pack(codes.view(torch.float8_e4m3fn), scale, groups)
    raw = fp8_linear.unpack(packed)
    want = linear.poisoned(codes, scale.float())
    assert want.isnan().any(), "codes of every kind, NaN too"
    torch.testing.assert_close(raw.scale, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(raw.values, codes)
    # What a lane takes from its 16 bytes, as ``dequantise`` and the tensor cores place it.
    tiles = packed.tiles[..., : 128 * 64].reshape(-1, packed.tiles.shape[2], 2, 2, 4, 32, 4, 4)
    padded = torch.zeros(packed.tiles.shape[0] * packed.tiles.shape[1] * 128, packed.tiles.shape[2] * 64)
    padded = padded.view(groups, -1, padded.shape[1])
    padded[:, :outputs, :channels] = codes.view(groups, outputs, channels).float()
    padded = padded.flatten(0, 1)
    for _ in range(200):
        at = [int(torch.randint(size, (), generator=generator)) for size in tiles.shape]
        block, tile, warpgroup, channel_block, warp, lane, word, byte = at
        step, row = word // 2, lane // 4 + 8 * (word % 2)
        output = 4 * (row % 8 // 2) + row % 2 + 2 * (row // 8)  # transposed, a lane stores four outputs in a row
        channel = 32 * channel_block + 16 * step + 2 * (lane % 4) + byte % 2 + 8 * (byte // 2)
        want_code = padded[128 * block + 64 * warpgroup + 16 * warp + output, 64 * tile + channel]
        assert tiles[tuple(at)] == want_code, at


@pytest.mark.parametrize(("groups", "outputs", "channels"), [(1, 128, 128), (1, 100, 96), (1, 300, 320), (3, 160, 64)])
def test_packed_weights_of_the_fast_class(groups, outputs, channels):
    """Where the tensor cores look for a value, and what 32 x 128 values under one scale have lost."""
    generator = torch.Generator().manual_seed(outputs)
    rows, per_group = groups * outputs, -(-outputs // 32)
    codes = torch.randint(127, (rows, channels), dtype=torch.uint8, generator=generator)
    codes |= torch.randint(2, codes.shape, dtype=torch.uint8, generator=generator) << 7
    scale = torch.randint(100, 112, (-(-rows // 32), channels // 32), dtype=torch.uint8, generator=generator)
    codes[5, 7] = 127  # NaN
    scale = scale.view(torch.float8_e8m0fnu)
    packed = fp8_linear_fast.pack(codes.view(torch.float8_e4m3fn), scale, groups)
    blocks, tiles = packed.tiles.shape[1:3]
    sixteens = packed.tiles[..., : 128 * 128].reshape(groups, blocks, tiles, 8, 2, 8, 8, 16)
    sixteens = torch.stack([sixteens[..., r, torch.arange(8) ^ r, :] for r in range(8)], 5)  # piece p is at p ^ row
    at = torch.arange(16)  # an output's row there: a lane stores four in a row
    row = 2 * (at // 4) + at % 2
    fields = sixteens.permute(0, 1, 3, 4, 5, 2, 6, 7)[:, :, :, at % 4 // 2, row]
    got = fields.reshape(groups, blocks * 128, tiles * 128).view(torch.float8_e4m3fn).double()
    common = packed.tiles[..., 128 * 128 :].contiguous().view(torch.float32).transpose(2, 3)
    common = common.reshape(groups, blocks * 4, tiles).double()
    each = common.repeat_interleave(32, 1).repeat_interleave(128, 2)
    got = (got * each)[:, :outputs, :channels]
    spread = scale.float().double()[: groups * per_group].view(groups, per_group, -1)
    spread = spread.repeat_interleave(32, 1).repeat_interleave(32, 2)[:, :outputs]
    want = codes.view(torch.float8_e4m3fn).double().view(groups, outputs, channels) * spread
    spoiled = want.isnan().view(groups, outputs, channels).nonzero()[0]
    assert common[spoiled[0], spoiled[1] // 32, spoiled[2] // 128].isnan() and common.isnan().sum() == 1
    known, each = ~got.isnan(), each[:, :outputs, :channels]
    assert (want.abs() <= 448 * each)[known].all()
    distance = ((got - want).abs() / each)[known]
    assert 0 < distance.max() <= 2.0**-10
    same = (want.abs() >= 2.0**-6 * each)[known]
    assert (distance[same] == 0).all()


@pytest.mark.parametrize("kind", [fp8_linear.EXACT, fp8_linear_fast.FAST], ids=["exact", "fast"])
def test_splits_follow_the_shape_and_none_is_empty(kind):
    for outputs, channels in [(512, 5120), (1792, 5120), (32768, 1280), (5120, 8192), (5120, 2304), (96, 32)]:
        tiles = torch.empty(1, -(-outputs // 128), -(-channels // kind.channels), 0)
        splits = fp8_linear.Weight(tiles, 1, outputs, channels, kind).splits
        units = -(-channels // 128)
        chunk = -(-units // splits)
        assert (splits - 1) * chunk < units <= splits * chunk
        assert splits == 1 or splits * tiles.shape[1] <= 132


# ---- the provider ----------------------------------------------------------------------------------------------------


def test_a_cpu_is_refused_with_the_reason():
    (cuda,) = (provider for provider in providers() if provider.name == "cuda")
    assert cuda.unavailable(torch.device("cpu")) == "it needs an NVIDIA GPU"


@pytest.mark.parametrize("file", sorted(Path(provider.__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_triton_kernels_call_nothing_of_the_triton_module(file):
    """SGLang puts functions of its own there (``triton.next_power_of_2``), which a kernel cannot call."""
    for function in ast.walk(ast.parse(file.read_text())):
        if isinstance(function, ast.FunctionDef) and any(
            "triton.jit" in ast.unparse(d) for d in function.decorator_list
        ):
            used = {
                ast.unparse(node)
                for part in function.body
                for node in ast.walk(part)
                if isinstance(node, ast.Attribute)
            }
            assert not [name for name in used if name.startswith("triton.")], function.name


@pytest.mark.parametrize("file", sorted(Path(provider.__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_triton_kernels_that_overlap_wait_first(file):
    """A kernel that touches memory before it waits for the one before it is right almost always."""
    tree = ast.parse(file.read_text())
    kernels = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Subscript):
            continue
        name = ast.unparse(call.func.value)
        if name not in kernels:
            continue
        body = kernels[name].body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        assert ast.unparse(body[0]) == "after_previous()", f"{name} does not wait first"
        assert any(word.arg is None and ast.unparse(word.value) == "OVERLAP" for word in call.keywords), name


def test_importing_the_kernels_imports_no_compiler():
    """On a machine without a GPU Triton and what compiles CUDA must not cost start-up time."""
    code = (
        "import sys, torch; before = set(sys.modules); import deepinfer_plugin.kernels as k; k.select('cpu');"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} & {'triton', 'cuda'}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.stdout.strip() == "[]", ran.stdout + ran.stderr
