"""Every TileLang kernel as the compiler emits it, run on the host, against the reference provider."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_plugin.kernels import reference
from deepinfer_plugin.kernels.ascend.tiles import (
    candidate_blocks,
    experts,
    index_scores,
    markov,
    mix,
    sparse_attention,
    top_groups,
)
from deepinfer_plugin.kernels.reference import formats

from ...kernels.cases import Random, make
from .. import documented
from ..emitted import source
from ..tile_cases import CASES
from .emulate import run

CORES, ROWS = 64, 6  # rows do not fill the cores: most have nothing to do
SIZES = ("released", "small")
OPS = reference.OPS


def names(kernel) -> list[str]:
    """Tensor parameters, in order."""
    return [name for name, parameter in kernel.signature.parameters.items() if parameter.default is parameter.empty]


def emulate(case: str, tensors: list[Tensor], scalars: dict[str, int], cores: int = CORES, **constants) -> None:
    kernel = CASES[case].kernel
    made = source(kernel, *[torch.empty(t.shape, dtype=t.dtype) for t in tensors], **constants)
    run(made, dict(zip(names(kernel), tensors, strict=True)), scalars, cores)


@pytest.fixture(params=SIZES)
def size(request) -> str:
    return request.param


@pytest.fixture
def draw() -> Random:
    return Random(5, torch.bfloat16)


def close(got: Tensor, want: Tensor, ulps: float = 1.0) -> None:
    """Within ``ulps`` bf16 steps of the largest value of a row."""
    got, want = got.double().flatten(1), want.double().flatten(1)
    bound = ulps * 2.0**-8 * want.abs().nan_to_num(posinf=0).amax(1, keepdim=True)
    assert torch.equal(got.isnan(), want.isnan()) and ((got - want).abs().nan_to_num() <= bound).all()


def test_mix(size, draw):
    (o, k), rows = getattr(CASES["mix"], size).values(), 11  # the last tile is not full
    streams = draw.normal(rows, 4, k // 4, spread=1)
    streams[1], streams[2, 3, 5], streams[3] = 0, torch.nan, streams[3] * 1e15
    fn = draw.normal(o, k, dtype=torch.float32) * k**-0.5 * 3
    base, scale = draw.normal(o, dtype=torch.float32), torch.tensor([0.7, 1.3, 0.9])
    out = torch.full((rows, o), -7.0)
    padded = torch.nn.functional.pad(scale, (0, 5), value=torch.nan)
    emulate("mix", [streams.flatten(1), fn, base, padded, out], {"R": rows})
    want = torch.cat([part.flatten(1) for part in OPS["hc_mix"](streams, fn, base, scale, 1e-20, 1e-6, 20)], 1)
    assert torch.equal(out.isnan(), want.isnan()) and out[2].isnan().all()
    assert ((out - want).abs().nan_to_num() <= 2e-5).all()


def test_collapse(size, draw):
    m, h = getattr(CASES["collapse"], size).values()
    streams, pre = draw.normal(ROWS, m, h, spread=1), torch.rand(ROWS, m)
    out = torch.zeros(ROWS, h, dtype=torch.bfloat16)
    emulate("collapse", [streams, pre, out], {"R": ROWS})
    close(out, OPS["hc_collapse"](streams, pre))
    assert not torch.equal(out, OPS["hc_collapse"](streams, torch.full_like(pre, 0.25))), "weights matter"


def test_expand(size, draw):
    m, h = getattr(CASES["expand"], size).values()
    arguments = (draw.normal(ROWS, h), draw.normal(ROWS, m, h), torch.rand(ROWS, m), torch.rand(ROWS, m, m))
    out = torch.zeros(ROWS, m, h, dtype=torch.bfloat16)
    emulate("expand", [*arguments, out], {"R": ROWS})
    close(out, OPS["hc_expand"](*arguments))


@pytest.mark.parametrize("limit", [10.0, 0.0])
def test_swiglu(size, draw, limit):
    i = getattr(CASES["swiglu"], size)["i"]
    gate, up, weight = draw.normal(ROWS, i) * 8, draw.normal(ROWS, i) * 8, torch.rand(ROWS)
    out = torch.zeros(ROWS, i, dtype=torch.bfloat16)
    emulate("swiglu", [gate, up, weight, out], {"R": ROWS}, limit=limit or 3.0e38)
    close(out, OPS["swiglu"](gate, up, limit, weight))


@pytest.mark.parametrize("case", ["norm", "norm q"])
def test_norm(size, draw, case):
    d = getattr(CASES[case], size)["d"]
    x, weight = draw.normal(ROWS, d, spread=4), draw.normal(d)
    x[2] = 0
    out = torch.ones(ROWS, d, dtype=torch.bfloat16)
    emulate(case, [x, weight, out], {"R": ROWS})
    close(out, OPS["rms_norm"](x, weight, 1e-20))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("case", ["rope", "rope index"])
def test_rope(size, draw, case, inverse):
    a, d, n = getattr(CASES[case], size).values()
    x, positions = draw.normal(ROWS, a, d), torch.tensor([0, 1, 77, 4096, 131071, 1 << 20])
    frequency = torch.logspace(0, -4, n)
    out = torch.zeros(ROWS, a, d, dtype=torch.bfloat16)
    emulate(case, [x, positions.float(), frequency, out], {"R": ROWS}, sign=-1.0 if inverse else 1.0)
    close(out, OPS["rope"](x, positions, frequency, inverse))


def adversarial(draw: Random, d: int, block: int) -> Tensor:
    """Rows that meet every rule of a cast: magnitudes far apart, ties, zeros, a NaN and an infinity, both ends."""
    x = draw.normal(ROWS, d, spread=6)
    x[1] = 0
    x[2] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(d // 8)
    x[3, 3], x[3, block + 5] = torch.nan, torch.inf
    x[4] = draw.normal(d) * 1e-6
    x[5] = draw.normal(d) * 3e37
    return x


def test_window_pack(size, draw):
    d = getattr(CASES["window_pack"], size)["d"]
    x = adversarial(draw, d, 32)
    out = torch.zeros(ROWS, (d + d // 32) // 4, dtype=torch.int32)
    emulate("window_pack", [x, out], {"R": ROWS})
    got, want = out.view(torch.uint8), OPS["window_pack"](x)
    assert torch.equal(got[:, d:], want[:, d:]), "scales, 255 included"
    whole = want[:, d:].repeat_interleave(32, 1) != 255
    assert torch.equal(got[:, :d][whole], want[:, :d][whole])


@pytest.mark.parametrize(
    ("case", "op", "block"), [("index_key_write", "index_key_write", 32), ("latent_write", "latent_write", 16)]
)
def test_page_write(size, draw, case, op, block):
    """Into a pool strided by the page, with gaps between sections that must stay as they are."""
    d, g = getattr(CASES[case], size).values()
    x = adversarial(draw, d, block)
    width = g * (d // 2 + d // block) + 64
    pool = torch.randint(0, 256, (7, width), dtype=torch.uint8)
    values = pool[:, : g * d // 2].unflatten(1, (g, d // 2))
    scales = pool[:, g * d // 2 + 32 : g * d // 2 + 32 + g * d // block].unflatten(1, (g, d // block))
    expected = pool.clone()
    expected_values = expected[:, : g * d // 2].unflatten(1, (g, d // 2))
    expected_scales = expected[:, g * d // 2 + 32 : g * d // 2 + 32 + g * d // block].unflatten(1, (g, d // block))
    page, group = torch.tensor([3, 6, 0, 3, 5, 1 << 40]), torch.tensor([0, g - 1, 1, 2, 3, 1 << 40])
    keep = torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.int32)
    OPS[op](x, expected_values, expected_scales, page, group, keep.bool())
    v, s = values.view(torch.int32), scales.view(torch.int32)
    strides = {"v0": v.stride(0), "v1": v.stride(1), "s0": s.stride(0), "s1": s.stride(1)}
    emulate(case, [x, v, s, page, group, keep], {"R": ROWS, "N": 7, **strides})
    assert torch.equal(scales, expected_scales), "NaN scales included"
    broken = formats.latent_dequant if block == 16 else formats.index_dequant
    got, want = broken(values, scales), broken(expected_values, expected_scales)
    assert torch.equal(got.nan_to_num(nan=1e30), want.nan_to_num(nan=1e30))
    gap = slice(g * d // 2, g * d // 2 + 32)
    assert torch.equal(pool[:, gap], expected[:, gap]) and torch.equal(pool[:, -32:], expected[:, -32:])


@pytest.mark.parametrize("case", ["row_write ring", "row_write tail", "row_write ngram"])
def test_row_write(size, draw, case):
    places, width = getattr(CASES[case], size).values()
    rows = torch.randint(0, 256, (ROWS, width), dtype=torch.uint8)
    state = torch.randint(0, 256, (5, places * width + 96), dtype=torch.uint8)  # a slot holds other things too
    memory = state[:, 32 : 32 + places * width].unflatten(1, (places, width))
    slot, place = torch.tensor([0, 4, 2, 2, -9, 1]), torch.tensor([places - 1, 0, 3, 4, 1 << 40, 2])
    keep = torch.tensor([1, 1, 1, 1, 0, 1], dtype=torch.int32)
    expected = state.clone()
    view = expected[:, 32 : 32 + places * width].unflatten(1, (places, width))
    kept = keep.bool()
    view[slot[kept], place[kept]] = rows[kept]
    strides = {"y0": memory.stride(0), "y1": memory.stride(1)}
    emulate(case, [rows, memory, slot, place, keep], {"R": ROWS, "N": 5, **strides})
    assert torch.equal(state, expected)


def test_compress_pair(size, draw):
    d, places = getattr(CASES["compress_pair"], size).values()
    value, score = torch.randn(ROWS, d), torch.randn(ROWS, d) * 4
    score[4, 3] = score[3, 3] = torch.inf
    position, fresh = torch.tensor([9, 5, 20, 21, 31, 8]), torch.tensor([0, 0, 0, 1, 0, 0])
    slot, tail = torch.tensor([1, 3, 3, 3, 4, 0]), torch.randn(5, places, 2, d)
    out = torch.zeros(ROWS, d, dtype=torch.bfloat16)
    want = OPS["compress_pair"](value, score, position, fresh, slot, tail, torch.bfloat16)
    strides = {"t0": tail.stride(0), "t1": tail.stride(1)}
    emulate("compress_pair", [value, score, out, position, fresh, slot, tail], {"R": ROWS, "N": 5, **strides})
    close(out, want)


def test_engram_gather(size, draw):
    d = getattr(CASES["engram_gather"], size)["d"]
    table, scale = formats.fp8_cast(draw.normal(50, d, dtype=torch.float32, spread=8))
    table.view(torch.uint8)[7] = torch.arange(d) % 256  # every code
    scale.view(torch.uint8)[9] = 255
    ids = torch.tensor([7, 49, 0, 9, 7, 13])
    out = torch.zeros(ROWS, d, dtype=torch.bfloat16)
    words = table.view(torch.uint8).view(torch.int32)
    emulate("engram_gather", [words, scale.view(torch.uint8), ids, out], {"P": ROWS, "N": 50})
    want = OPS["engram_gather"](ids[:, None], table, scale, torch.bfloat16)
    assert torch.equal(out.double().nan_to_num(nan=1e30), want.double().nan_to_num(nan=1e30))


def test_engram_gate(size, draw):
    m, h = getattr(CASES["engram_gate"], size).values()
    streams, kv = draw.normal(ROWS, m, h, spread=1), draw.normal(ROWS, (m + 1) * h)
    kv[:, :h] *= streams[:, 0].sign()  # agrees: the gate opens
    kv[4] = torch.nan
    q, k = draw.normal(m, h), draw.normal(m, h)
    live = torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.int32)
    out = torch.zeros(ROWS, m, h, dtype=torch.bfloat16)
    emulate("engram_gate", [streams, kv.view(ROWS, m + 1, h), q, k, live, out], {"R": ROWS})
    want = OPS["engram_gate"](streams, kv, q, k, 1e-20, live.bool())
    close(out, want)
    assert torch.equal(out[2], streams[2]) and torch.equal(out[4], streams[4]), "rows that are not live"


def test_engram_hash(size, draw):
    places, columns = getattr(CASES["engram_hash"], size).values()
    classes = torch.tensor([5, 90000, -1, 17, 4, 99091])
    position, fresh = torch.tensor([0, 1, 2, 3, 700, 2]), torch.tensor([0, 1, 2, 3, 0, 0])
    slot = torch.tensor([2, 2, 2, 2, 4, 0])
    state = torch.randint(-1, 99092, (5, places + 3))
    ngrams = state[:, 1 : 1 + places]
    multipliers = torch.randint(0, 1 << 45, (4,)) * 2 + 1
    primes = torch.tensor([15999999 + 2 * i for i in range(columns)])
    offsets = torch.arange(columns) * 16000000
    out = torch.zeros(ROWS, columns, dtype=torch.int64)
    arguments = [classes, position, fresh, slot, ngrams, multipliers, primes, offsets]
    emulate("engram_hash", [*arguments, out], {"R": ROWS, "N": 5, "n0": ngrams.stride(0)}, pad=7)
    arguments[6] = primes.view(3, -1)
    assert torch.equal(out, OPS["engram_hash"](*arguments, 7))


@pytest.mark.parametrize("low", [True, False], ids=["model", "deepinfer"])
def test_index_scores(size, draw, low, monkeypatch):
    heads, groups = getattr(CASES["index_scores"], size).values()
    pool = torch.randint(0, 256, (5, groups * 68 + 160), dtype=torch.uint8)  # a page holds other things too
    key, scale = draw.keys(5, groups, 128)
    key_view = pool[:, 32 : 32 + groups * 64].unflatten(1, (groups, 64))
    scale_view = pool[:, 64 + groups * 64 : 64 + groups * 68].unflatten(1, (groups, 4))
    key_view.copy_(key), scale_view.copy_(scale)
    scale_view[2, 7, 1] = 255  # a key that is no number
    query, weight = draw.normal(ROWS, heads, 128), draw.normal(ROWS, heads)
    query[4, 3, 64:96] = torch.nan
    table = torch.tensor([[4, 1, 2, 3], [1 << 40, 0, 0, 0], [2, 2, 0, 1 << 50]])
    requests = torch.tensor([0, 2, 0, 1, 2, 0])
    visible = torch.tensor([4 * groups, 3 * groups, groups + 1, 0, 11, 2 * groups - 1])

    def page_scores(*tensors: Tensor, **constants) -> None:
        strides = {"k0": tensors[2].stride(0), "s0": tensors[3].stride(0)}
        emulate("index_scores", list(tensors), {"R": ROWS, "N": 5, "B": 3, "P": 4, **strides}, cores=32, **constants)

    monkeypatch.setattr(index_scores, "page_scores", page_scores)
    got = index_scores.index_scores(query, weight, key_view, scale_view, table, requests, visible, low)
    want = OPS["index_scores"](query, weight, key_view, scale_view, table.clamp(0, 4), requests, visible, low)
    assert torch.equal(got.isnan(), want.isnan()) and got[4, :11].isnan().all() and got[0].isnan().sum() == 1
    near = torch.isclose(got.float(), want.float(), rtol=2.0**-6, atol=1e-3, equal_nan=True)
    assert near.all() and (got == want).float().mean() > 0.7


def scores_of_every_kind(draw: Random, groups: int) -> tuple[Tensor, Tensor]:
    """Scores whose cut falls into ties, infinities, NaN and both zeros, and how many groups rows reach."""
    scores = draw.normal(ROWS, groups)
    scores[1] = draw.ints(-2, 3, groups)  # hardly any that differ
    scores[2] = torch.tensor([torch.nan, -torch.inf, torch.inf, 0.0, -0.0, 3e38, -3e38, 1e-40]).repeat(groups // 8)
    scores[3] = torch.nan
    visible = torch.tensor([groups, groups - 5, groups + 9, groups // 2 + 3, 11, 0], dtype=torch.int32)
    for row, reach in enumerate(visible.tolist()):
        scores[row, reach:] = torch.inf  # what no row may look at
    return scores, visible


@pytest.mark.parametrize("blocks", [2048, 40])
def test_candidate_blocks(size, draw, blocks):
    groups = getattr(CASES["candidate_blocks"], size)["g"]
    scores, visible = scores_of_every_kind(draw, groups)
    out = torch.full((ROWS, groups // 4), -1, dtype=torch.int32)
    emulate("candidate_blocks", [scores, visible, out], {"R": ROWS}, blocks=blocks)
    want = OPS["candidate_blocks"](scores, visible.long(), 8, blocks)
    assert torch.equal(out.view(torch.uint8), want.to(torch.uint8))


def test_top_groups(size, draw):
    groups, k = getattr(CASES["top_groups"], size).values()
    scores, visible = scores_of_every_kind(draw, groups)
    candidates = torch.ones(ROWS, groups, dtype=torch.bool)
    candidates[0] = draw.mask(groups)
    candidates[1] = torch.arange(groups) % 97 == 3  # fewer than there are places
    out = torch.full((ROWS, k), 1 << 40)
    emulate("top_groups", [scores, visible, candidates.view(torch.uint8), out], {"R": ROWS}, k=k - 3)
    assert torch.equal(out[:, : k - 3], OPS["top_groups"](scores, visible.long(), k - 3, candidates))
    assert (out[:, k - 3 :] == -1).all()


@cache
def lowered_attention(heads: int, size: int, length: int, groups: int, **constants) -> str:
    """It takes the compiler a minute, and any number of rows and selected groups is served by one."""
    case = CASES["sparse_attention"]
    return source(case.kernel, *case.tensors(6, heads, size, length, groups, 100), **constants)


@pytest.fixture
def attended(monkeypatch):
    """The attention kernel on the host, behind the op that pads and numbers for it."""
    kernel = sparse_attention.attended

    def run_attended(*tensors: Tensor, **constants) -> None:
        q, _, ring, latent, scale, table, _, selected = tensors[:8]
        counts = {"R": q.shape[0], "N": ring.shape[0], "M": latent.shape[0], "K": selected.shape[1]}
        counts |= {"B": table.shape[0], "P": table.shape[1]}
        pairs = zip("wvs", (ring, latent, scale), strict=True)
        strides = {f"{name}{i}": view.stride(i) for name, view in pairs for i in (0, 1)}
        made = lowered_attention(*q.shape[1:], ring.shape[1], latent.shape[1], **constants)
        run(made, dict(zip(names(kernel), tensors, strict=True)), counts | strides, cores=32)

    monkeypatch.setattr(sparse_attention, "attended", run_attended)


def attention(draw: Random, tmp_path, heads: int, size: int, length: int, groups: int, k: int) -> dict[str, Any]:
    """Seven rows that meet every rule of the op. Rings and pages lie 4 GiB apart: ids times strides exceed 2^31 bytes
    and words."""
    far, width = 1 << 32, size + size // 32
    file = tmp_path / "memory"
    with open(file, "wb") as holes:
        holes.truncate(2 * far + (1 << 20))
    memory = torch.from_file(str(file), shared=True, size=2 * far + (1 << 20), dtype=torch.uint8)
    ring = memory.as_strided((3, length, width), (far, width, 1), 64)
    latent = memory.as_strided((3, groups, size // 2), (far, size // 2, 1), 1 << 17)
    latent_scale = memory.as_strided((3, groups, size // 16), (far, size // 16, 1), 1 << 18)
    ring.copy_(draw.window(3, length, size))
    for into, made in zip((latent, latent_scale), draw.latents(3, groups, size), strict=True):
        into.copy_(made)
    ring[2, 3:] = 255  # rows that nobody has written
    latent_scale[1, 1] = 127
    selected = draw.ints(-1, 2 * groups, 7, k)  # some of them twice
    selected[selected == groups + 1] = groups  # the broken latent
    selected[0], selected[5], selected[1, 5:] = -1, -1, -1
    selected[4, 7] = groups + 1
    positions = torch.tensor([3, 4, 2 * length, 2 * length + 1, 20, 9, 30])
    ring[0, 29] = 255
    q = draw.normal(7, heads, size) * 2
    q[3, 2, 5] = torch.nan
    return {
        "q": q,
        "window": draw.window(7, size),
        "positions": positions,
        "fresh": torch.tensor([0, 1, 0, 1, 0, 0, 0]),
        "row_slots": torch.tensor([2, 2, 1, 1, 0, 0, 0]),
        "window_floor": torch.tensor([0, 0, 0, 0, 15, 10, 0]),
        "ring": ring,
        "window_len": length - 6,
        "latent": latent,
        "latent_scale": latent_scale,
        "page_table": torch.tensor([[2, 1 << 50, 0], [2, 0, 1 << 40], [0, 1, 2]]),
        "requests": torch.tensor([0, 1, 1, 1, 2, 0, 1]),
        "selected": selected,
        "sink": draw.normal(heads, dtype=torch.float32),
        "scale": size**-0.5,
        "block_future": None,
    }


def test_sparse_attention(size, draw, attended, tmp_path):
    args = attention(draw, tmp_path, *getattr(CASES["sparse_attention"], size).values())
    got, want = sparse_attention.sparse_attention(**args), OPS["sparse_attention"](**args)
    close(got, want)
    assert (got == want).float().mean() > 0.7
    broken = got.isnan().all(-1)
    assert broken[4].all() and broken[6].all(), "a key that is no number"
    assert broken[3, 2] and broken.sum() == 2 * broken.shape[1] + 1 == got.isnan().any(-1).sum(), "a query that is none"
    assert not got[5].any(), "no keys"


@pytest.mark.parametrize("rows", [5, 7])
def test_sparse_attention_of_drafts(draw, attended, tmp_path, rows):
    """Layers without latents; rows of a block see each other."""
    args = attention(draw, tmp_path, *CASES["sparse_attention"].small.values())
    args |= dict.fromkeys(("latent", "latent_scale", "page_table", "requests", "selected"))
    args |= {"positions": torch.arange(50, 57), "fresh": torch.arange(7), "row_slots": torch.ones(7, dtype=torch.int64)}
    args |= {"window_floor": torch.full((7,), 20), "block_future": torch.arange(rows - 1, rows - 8, -1)}
    for name in ("q", "window", "positions", "fresh", "row_slots", "window_floor", "block_future"):
        args[name] = args[name][:rows]
    got, want = sparse_attention.sparse_attention(**args), OPS["sparse_attention"](**args)
    close(got, want)
    assert (got == want).float().mean() > 0.99


@pytest.mark.parametrize("name", ["sparse_attention", "window_attention"])
def test_few_heads_are_padded(attended, name):
    case = make(name, torch.bfloat16, 7, scale=2)
    close(sparse_attention.sparse_attention(**case.args), OPS["sparse_attention"](**case.args))


@pytest.fixture
def grouped(monkeypatch):
    """The product of experts on the host; what is plain around it with torch_npu's ops as documented."""
    kernel, made = experts.grouped, {}

    def run_grouped(*tensors: Tensor, **constants) -> None:
        shape, (count, outputs, _) = tensors[0].shape, tensors[1].shape
        if shape[1:] not in made:
            empty = [torch.empty(t.shape, dtype=t.dtype) for t in tensors]
            made[shape[1:]] = source(kernel, *empty, **constants)
        counts = {"A": shape[0], "E": count, "N": outputs}
        run(made[shape[1:]], dict(zip(names(kernel), tensors, strict=True)), counts, cores=32)

    monkeypatch.setattr(experts, "grouped", run_grouped)
    with documented.installed():
        yield


@pytest.mark.parametrize(
    ("tokens", "choices", "count", "hidden", "inner"),
    [(3, 2, 2, 5120, 2304), (7, 3, 6, 256, 128), (60, 3, 4, 256, 384)],
    ids=["released", "small", "small many"],
)
def test_moe_experts(draw, grouped, tokens, choices, count, hidden, inner):
    w13, s13, w2, s2 = *draw.mxfp4(count, 2 * inner, hidden), *draw.mxfp4(count, hidden, inner)
    ids = torch.stack([torch.randperm(count, generator=draw.generator)[:choices] for _ in range(tokens)])
    ids[1], ids[2, 0] = -1, -1  # experts of other ranks
    x, weights = draw.normal(tokens, hidden), torch.rand(tokens, choices, generator=draw.generator)
    if hidden < 5120:
        x[2, 5] = torch.nan
        s13.view(torch.uint8)[1, 3, 0] = 255
    args = (w13, s13, w2, s2)
    got = experts.moe_experts(x, weights, ids, experts.prepare_experts(*args), 10.0)
    want = OPS["moe_experts"](x, weights, ids, OPS["prepare_experts"](*args), 10.0)
    assert torch.equal(got.isnan(), want.isnan()) and got.isnan().any() == (hidden < 5120)
    assert not got[1].any(), "no expert here"
    # Terms are rounded to bf16 before they are added.
    bound = 2.0**-7 * want.abs().nan_to_num().amax(1, keepdim=True)
    assert ((got - want).abs().nan_to_num() <= bound).all() and (got == want)[~want.isnan()].float().mean() > 0.9


def test_experts_are_kept_as_they_are_given(draw):
    given = *draw.mxfp4(3, 256, 128), *draw.mxfp4(3, 128, 128)
    prepared = experts.prepare_experts(*(part.clone() for part in given))
    experts.replace_expert(prepared, 2, *experts.read_expert(prepared, 0))
    for part, original in zip(experts.read_expert(prepared, 2), given, strict=True):
        assert torch.equal(part.view(torch.uint8), original.view(torch.uint8)[0])


def test_markov(size, draw):
    v, d = getattr(CASES["markov"], size).values()
    v = min(v, 1280)  # the released head a part at a time would take minutes here
    prev, embed, head = draw.ints(0, v, 11), draw.normal(v, d), draw.normal(v, d)
    embed[prev[4], 3] = torch.nan
    out = torch.full((11, v), -7.0)
    emulate("markov", [embed[prev], head, out], {"R": 11})
    want, _ = OPS["markov"](prev, embed, OPS["prepare_dense"](head))
    assert torch.equal(out.isnan(), want.isnan()) and out.isnan().any()
    assert ((out - want).abs().nan_to_num() <= 1e-5 * d**0.5).all()


def test_confidence(size, draw):
    h, n = getattr(CASES["confidence"], size).values()
    hidden, e, proj = draw.normal(ROWS, h), draw.normal(ROWS, n), draw.normal(1, h + n)
    out = torch.zeros(ROWS, 8)
    emulate("confidence", [hidden, e, proj.flatten(), out], {"R": ROWS})
    want = OPS["confidence"](hidden, e, proj)
    assert ((out[:, 0] - want).abs() <= 1e-5 * (h + n) ** 0.5).all() and torch.equal(out[:, 0], out[:, 7])


# ---- what surrounds a kernel: padding, shapes, constants -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "module", "kernel"),
    [("hc_mix", mix, "mixed"), ("top_groups", top_groups, "best"), ("candidate_blocks", candidate_blocks, "kept")],
    ids=["mix", "top", "blocks"],
)
def test_the_op_around_its_kernel(monkeypatch, name, module, kernel):
    original = getattr(module, kernel)

    def on_the_host(*tensors: Tensor, **constants) -> None:
        made = source(original, *[torch.empty(t.shape, dtype=t.dtype) for t in tensors], **constants)
        run(made, dict(zip(names(original), tensors, strict=True)), {"R": tensors[0].shape[0]}, CORES)

    monkeypatch.setattr(module, kernel, on_the_host)
    case = make(name, torch.bfloat16, 7)
    got = getattr(module, name)(**case.args)
    want = OPS[name](**case.args)
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for actual, expected in pairs:
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        assert torch.allclose(actual, expected, atol=2e-5, rtol=0)


def test_sizes_that_a_kernel_does_not_take_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="force hc_mix=ascend"):
        mix.hc_mix(torch.empty(1, 3, 64), torch.empty(15, 192), torch.empty(15), torch.empty(3), 1e-20, 1e-6, 20)
    with pytest.raises(NotImplementedError, match="force top_groups=ascend"):
        top_groups.top_groups(torch.empty(1, top_groups.MOST + 1), torch.empty(1), 512, None)
    with pytest.raises(NotImplementedError, match="force candidate_blocks=ascend"):
        candidate_blocks.candidate_blocks(torch.empty(1, 64), torch.empty(1), 6, 4)
    query, key = torch.empty(1, 32, 64), torch.empty(5, 64, 32, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="force index_scores=ascend"):
        index_scores.index_scores(query, query[..., 0], key, key[..., :2], query, query, query, True)
    for wrong in ((1, 96, 512), (1, 64, 192)):
        with pytest.raises(NotImplementedError, match="force sparse_attention=ascend"):
            sparse_attention.sparse_attention(torch.empty(wrong), *(None,) * 15)
    odd = experts.Experts(*(torch.empty(1, 192, 96, dtype=torch.uint8),) * 4)
    with pytest.raises(NotImplementedError, match="force moe_experts=ascend"):
        experts.moe_experts(torch.empty(1, 192), torch.empty(1, 1), torch.zeros(1, 1, dtype=torch.int64), odd, 10.0)
    with pytest.raises(NotImplementedError, match="force markov=ascend"):
        markov.markov(torch.empty(1), torch.empty(70, 32), torch.empty(70, 32))
