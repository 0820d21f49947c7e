"""Launches of the routed experts' kernels of the exact class (``experts.cu``), the layout of weights they read, and
what the fast class (``experts_fp8.py``) shares with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from .. import reference
from . import jit
from .jit import SHARED_BYTES

ROWS, CHANNELS = 64, 128  # of a weight tile
BLOCK = 4  # tiles of neighbouring rows that lie together
TILE_BYTES = ROWS * CHANNELS // 2 + ROWS * CHANNELS // 32
GROUP = 8  # tokens of a core matrix; an expert begins at a multiple
# Where the four bits of a code (sign, exponent, exponent, mantissa) lie in a half-word, for each of its four codes.
BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))
LARGEST_SCALE = 128  # UE8M0 byte whose factor still fits (``_scales``)

MOST_PAIRS = 96 << 10  # of one pass: bounds the memory of copies; more tokens go in several passes


@dataclass(frozen=True)
class Tiling:
    """How a block shares its work: up to ``columns`` tokens in steps of ``step``, 64 rows for each warpgroup."""

    columns: int
    step: int
    warpgroups: int  # as many as the registers of a multiprocessor hold with these columns


FEW, MANY = Tiling(64, 8, 4), Tiling(256, 32, 2)


@dataclass(frozen=True)
class Product:
    """The weights of one product, for all experts."""

    tiles: Tensor  # uint8 [experts, row tiles / BLOCK, channel tiles, BLOCK, TILE_BYTES]
    factors: Tensor  # float32 [experts], powers of two taken out of the scales
    nan_scales: bool


P = TypeVar("P", bound="Layout")


class Layout(Protocol):
    """The weights of one product in tiles, whatever the class of the kernel that reads them."""

    @property
    def tiles(self) -> Tensor: ...

    @property
    def factors(self) -> Tensor: ...


@dataclass(frozen=True)
class Experts(Generic[P]):
    gate_up: P
    down: P
    hidden: int
    inner: int

    def views(self, slot: int) -> tuple[Tensor, ...]:
        """``Ops.expert_views``. NaN among the scales: as with ``replace_expert``."""
        one = slice(slot, slot + 1)
        products = self.gate_up, self.down
        return tuple(part[one] for product in products for part in (product.tiles, product.factors))

    def rows(self) -> tuple[Tensor, Tensor]:
        """int64: which row comes where in the tiles of either product."""
        device = self.down.tiles.device
        return alternating(self.inner, device), torch.arange(self.hidden, device=device)


def kernel(experts: Experts[Product], tiling: Tiling, topk: int) -> tuple[jit.Kernel, int]:
    """The kernel of both products, and the bytes of shared memory it wants."""
    count, columns = experts.down.tiles.shape[0], tiling.columns
    stage = tiling.warpgroups * TILE_BYTES + columns * CHANNELS * 2
    static = 4 * (count + 1) + 2 * 4 * tiling.warpgroups * columns + 1024  # and barriers
    stages = min(12, (SHARED_BYTES - static) // stage)
    nan_scales = int(experts.gate_up.nan_scales or experts.down.nan_scales)
    return products("experts.cu", experts, tiling, topk, stages, NAN_SCALES=nan_scales), stages * stage


def products(file: str, experts: Experts[Any], tiling: Tiling, topk: int, stages: int, **defines: int) -> jit.Kernel:
    """The kernel of a class, shared so."""
    return jit.kernel(
        file,
        "products",
        tuple(range(tiling.step, tiling.columns + 1, tiling.step)),
        jit.ARCH,
        EXPERTS=experts.down.tiles.shape[0],
        TOPK=topk,
        HIDDEN=experts.hidden,
        INNER=experts.inner,
        WARPGROUPS=tiling.warpgroups,
        NMAX=tiling.columns,
        STEP=tiling.step,
        STAGES=stages,
        **defines,
    )


def prepare_experts(w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> Experts[Product]:
    return laid_out(pack, w13, s13, w2, s2)


def replace_expert(experts: Experts[Product], slot: int, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> None:
    """A NaN among the scales comes out as infinity or NaN if ``prepare_experts`` met none: the kernel that makes NaN of
    it is another one."""
    replace_with(_pack_one, experts, slot, w13, s13, w2, s2)


def read_expert(experts: Experts[Product], slot: int) -> reference.moe.Expert:
    return read_with(_unpack_one, experts, slot)


def laid_out(
    pack: Callable[[Tensor, Tensor, Tensor], P], w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor
) -> Experts[P]:
    """pack: (codes, scales, rows) of all experts -> the layout of a product."""
    inner, hidden = w13.shape[1] // 2, w2.shape[1]
    gate_up = pack(w13, s13, alternating(inner, w13.device))
    return Experts(gate_up, pack(w2, s2, torch.arange(hidden, device=w2.device)), hidden, inner)


def replace_with(
    pack_one: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any], experts: Experts[P], slot: int, *raw: Tensor
) -> None:
    """pack_one: (codes, scales, rows, tiles, factors) of an expert. raw: w13, s13, w2, s2."""
    for at, (product, rows) in enumerate(zip((experts.gate_up, experts.down), experts.rows(), strict=True)):
        pack_one(raw[2 * at], raw[2 * at + 1], rows, product.tiles[slot], product.factors[slot])


def read_with(
    unpack_one: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]], experts: Experts[P], slot: int
) -> reference.moe.Expert:
    """unpack_one: (tiles, factors, rows, channels) of an expert -> its codes and scales."""
    gate_up, down = experts.gate_up, experts.down
    rows = experts.rows()
    return (
        *unpack_one(gate_up.tiles[slot], gate_up.factors[slot], rows[0], experts.hidden),
        *unpack_one(down.tiles[slot], down.factors[slot], rows[1], experts.inner),
    )


def alternating(inner: int, device: torch.device) -> Tensor:
    """Rows of a gate-and-up tile: eight gate rows, the eight up rows of the same channels, and so on."""
    channel = torch.arange(inner, device=device).view(-1, 8)
    return torch.stack((channel, channel + inner), 1).flatten()


def pack(codes: Tensor, scales: Tensor, rows: Tensor) -> Product:
    """codes uint8 [E, N, K/2], scales UE8M0 [E, N, K/32], ``rows`` int64: which row comes where.

    Raises:
        ValueError: the scales of an expert are too far apart for one factor.
    """
    experts, _, half = codes.shape
    tiles = empty_tiles(experts, rows.shape[0], 2 * half, codes.device)
    factors = torch.empty(experts, dtype=torch.float32, device=codes.device)
    if codes.is_meta:  # only shapes are asked for
        return Product(tiles, factors, nan_scales=False)
    lost = torch.empty(experts, dtype=torch.bool, device=codes.device)
    for expert in range(experts):  # one at a time: the unpacked form is eight times as large
        lost[expert] = _pack_one(codes[expert], scales[expert], rows, tiles[expert], factors[expert])
    if bool(lost.any()):
        named = lost.nonzero().flatten().tolist()
        raise ValueError(f"prepare_experts: scales of experts {named} span more than 2^126; the cuda kernel holds less")
    return Product(tiles, factors, bool((scales.view(torch.uint8) == 255).any()))


def empty_tiles(experts: int, rows: int, channels: int, device: torch.device) -> Tensor:
    shape = experts, -(-rows // (BLOCK * ROWS)), -(-channels // CHANNELS), BLOCK, TILE_BYTES
    return torch.empty(shape, dtype=torch.uint8, device=device)


def fill(tiles: Tensor, words: Tensor, scales: Tensor) -> None:
    """words uint8 [row tiles, channel tiles, 4096] and scales uint8 [rows, K/32] into the ``tiles`` of an expert."""
    blocks, channel_tiles = tiles.shape[:2]
    by_row = tiles.transpose(1, 2)  # [blocks, BLOCK, channel tiles, bytes]
    by_row[..., : ROWS * CHANNELS // 2] = words.unflatten(0, (blocks, BLOCK))
    by_row[..., ROWS * CHANNELS // 2 :].unflatten(-1, (ROWS, 4)).copy_(
        scales.view(blocks, BLOCK, ROWS, channel_tiles, 4).transpose(2, 3)
    )


def spread(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """The words and scales that ``fill`` put into the ``tiles`` of an expert."""
    by_row = tiles.transpose(1, 2).flatten(0, 1)  # [row tiles, channel tiles, bytes]
    words, scales = by_row.split((ROWS * CHANNELS // 2, ROWS * CHANNELS // 32), -1)
    return words, scales.unflatten(-1, (ROWS, 4)).transpose(1, 2).flatten(2).flatten(0, 1)


def _pack_one(codes: Tensor, scales: Tensor, rows: Tensor, tiles: Tensor, factor: Tensor) -> Tensor:
    """One expert into its tiles and its factor; whether a scale is lost, bool []."""
    (blocks, channel_tiles), half = tiles.shape[:2], codes.shape[1]
    padded = torch.zeros(blocks * BLOCK * ROWS, channel_tiles * CHANNELS // 2, dtype=torch.uint8, device=codes.device)
    padded[: rows.shape[0], :half] = codes[rows]
    used = ((padded[: rows.shape[0], :half] & 0x77) != 0).view(rows.shape[0], -1, 16).any(-1)
    stored, taken, lost = _scales(scales.view(torch.uint8)[rows], used)
    padded_scales = torch.zeros(padded.shape[0], channel_tiles * 4, dtype=torch.uint8, device=codes.device)
    padded_scales[: rows.shape[0], : stored.shape[1]] = stored
    fill(tiles, _words(padded), padded_scales)
    factor.copy_(taken)
    return lost


def _words(codes: Tensor) -> Tensor:
    """uint8 [N, K/2] -> uint8 [N/64, K/128, 4096]: 32-bit words, [two rows of a lane][lane][block of 32 channels]."""
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1).to(torch.int32)
    row_tiles, channel_tiles = nibbles.shape[0] // ROWS, nibbles.shape[1] // CHANNELS
    # rows: tile, warp, half, eighth; channels: tile, block, step, high, owner, odd
    fields = nibbles.view(row_tiles, 4, 2, 8, channel_tiles, 4, 2, 2, 4, 2)
    fields = fields.permute(0, 4, 2, 1, 3, 8, 5, 9, 6, 7)  # tiles, half, warp, eighth, owner, block, odd, step, high
    fields = fields.reshape(row_tiles, channel_tiles, 2, 4, 8, 4, 4, 2, 4)  # ..., odd, code of the half-word
    word = torch.zeros(fields.shape[:-2], dtype=torch.int64, device=codes.device)
    for odd in range(2):
        for place, bits in enumerate(BITS):
            for source, bit in zip((3, 2, 1, 0), bits, strict=True):
                word |= ((fields[..., odd, place] >> source & 1).to(torch.int64)) << (bit + 16 * odd)
    word = torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)
    return word.reshape(row_tiles, channel_tiles, -1).view(torch.uint8)


def _unpack_one(tiles: Tensor, factor: Tensor, rows: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """What ``_pack_one`` was given: codes uint8 [N, K/2] and scales UE8M0 [N, K/32]."""
    words, stored = spread(tiles)
    excess = torch.frexp(factor).exponent - 1
    scales = torch.where(stored == 255, 255, stored.to(torch.int32) - 126 + excess).to(torch.uint8)
    place = rows.argsort()  # of each row among the tiles'
    return _codes(words)[place, : channels // 2], scales[place, : channels // 32].view(torch.float8_e8m0fnu)


def _codes(words: Tensor) -> Tensor:
    """uint8 [N/64, K/128, 4096] -> [N, K/2]: ``_words`` undone."""
    row_tiles, channel_tiles, _ = words.shape
    # half, warp, eighth, owner, block
    word = words.contiguous().view(torch.int32).view(row_tiles, channel_tiles, 2, 4, 8, 4, 4)
    pairs = []  # of codes, for each step and high
    for bits in BITS:
        pair = torch.zeros_like(word)
        for source, bit in zip((3, 2, 1, 0), bits, strict=True):
            pair |= (word >> bit & 0x10001) << source  # of both half-words
        pairs.append((pair & 15 | pair >> 12).to(torch.uint8))
    # rows: tile, warp, half, eighth; channels: tile, block, step and high, owner
    fields = torch.stack(pairs, -1).permute(0, 3, 2, 4, 1, 6, 7, 5)
    return fields.reshape(row_tiles * ROWS, channel_tiles * CHANNELS // 2)


def _scales(scales: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """UE8M0 bytes [N, K/32] -> the bytes to store, the factor taken out of them, and whether a scale is lost. ``used``
    bool [N, K/32]: blocks that are not all zero; the others' scales do not matter.

    A code in bf16's own bits is 2^-126 of its value, so the stored byte is the exponent of 2^126 times the scale. That
    fits up to a scale of 2; a matrix with larger ones is scaled down as a whole. 255 stays NaN.
    """
    used = used & (scales != 255)
    finite = scales.to(torch.int32).masked_fill(~used, 0)
    excess = (finite.max() - LARGEST_SCALE).clamp(min=0)
    lost = (used & (finite < excess)).any()
    stored = torch.where(scales == 255, 255, (finite - excess).clamp(min=0) + 126).to(torch.uint8)
    return stored, torch.exp2(excess.to(torch.float32)), lost


def moe_experts(x: Tensor, weights: Tensor, ids: Tensor, experts: Experts[Product], limit: float) -> Tensor:
    if x.dtype == torch.float32:
        wide = reference.moe.experts_of(
            partial(read_expert, experts), experts.gate_up.tiles.shape[0], experts.hidden, experts.inner
        )
        return reference.moe.moe_experts(x, weights, ids, wide, limit)
    return in_passes(_pass, x, weights, ids, experts, limit)


def in_passes(
    run: Callable[[Tensor, Tensor, Tensor, Experts[P], float, Tensor], None],
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    experts: Experts[P],
    limit: float,
) -> Tensor:
    """float32 [T, hidden], as many tokens at a time as the memory of copies is meant to hold. run: the same and the
    rows of the result that it fills."""
    tokens, topk = ids.shape
    if not topk:
        return torch.zeros(tokens, experts.hidden, dtype=torch.float32, device=x.device)
    out = torch.empty(tokens, experts.hidden, dtype=torch.float32, device=x.device)
    step = max(1, MOST_PAIRS // topk)
    x = jit.aligned(x)
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        run(x[part].contiguous(), weights[part].contiguous(), ids[part].contiguous(), experts, limit, out[part])
    return out


@dataclass(frozen=True)
class Routing:
    """What ``route`` makes of the choices of tokens: pairs of a token and an expert, expert by expert."""

    begins: Tensor  # int32 [experts + 1], positions, multiples of GROUP
    counts: Tensor  # int32 [experts]
    order: Tensor  # int32 [positions]: pairs, -1 where an expert's last group has none
    weights: Tensor  # float32 [positions]
    whose: Tensor  # int32 [groups]: experts
    progress: Tensor  # int32 [2 + groups], zero: ``experts.cuh``


def route(like: jit.Kernel, weights: Tensor, ids: Tensor, experts: int) -> Routing:
    tokens, topk = ids.shape
    pairs = tokens * topk
    groups = -(-pairs // GROUP) + min(experts, pairs)  # at most: every expert may end with a part of a group

    def empty(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=ids.device)

    positions = groups * GROUP
    routing = Routing(
        empty(experts + 1), empty(experts), empty(positions), empty(positions, torch.float32), empty(groups),
        empty(2 + groups),
    )  # fmt: skip
    jit.kernel_like(like, "route").launch(
        (experts,), 1024, 0, ids, weights, routing.begins, routing.counts, routing.order, routing.weights,
        routing.whose, routing.progress, tokens, overlap=True,
    )  # fmt: skip
    return routing


def gather(like: jit.Kernel, x: Tensor, routing: Routing, *out: Tensor) -> None:
    """The tokens of ``x`` [T, hidden] in the order of ``routing``, as the class has them."""
    parts = -(-x.shape[1] // (8 * CHANNELS))
    grid = min(routing.whose.shape[0] * parts, 8 * jit.multiprocessors(x.device))
    jit.kernel_like(like, "gather").launch(
        (grid,), 256, 0, x, routing.begins, routing.counts, routing.order, routing.whose, *out, overlap=True
    )


def multiply(
    experts: Experts[Any], routing: Routing, tilings: tuple[Tiling, Tiling], kernels: Sequence[tuple[jit.Kernel, int]],
    choices: torch.Size, tensors: Sequence[Tensor], limit: float,
) -> None:  # fmt: skip
    """Both products. tilings: for few and for many tokens an expert; choices: [T, k]; tensors: what ``gather`` made,
    what goes between the products, and what they make.

    How many tokens an expert has is known on the device only. So both kernels are launched, and each serves the experts
    with its numbers of tokens, unless there cannot be many: a token chooses an expert once. Nor is it worth while for a
    few of them.
    """
    gate_up, down = experts.gate_up, experts.down
    count, split, endless = down.tiles.shape[0], tilings[0].columns, 1 << 30
    blocks = jit.multiprocessors(down.tiles.device)
    if choices[0] <= split or 4 * choices.numel() <= 3 * split * count:
        served: tuple[tuple[int, int], ...] = ((1, endless),)
    else:
        served = ((1, split), (split + 1, endless))
    for turn, ((fewest, most), tiling, (kernel, shared)) in enumerate(zip(served, tilings, kernels, strict=False)):
        kernel.launch(
            (blocks,), 128 * (tiling.warpgroups + 1), shared, gate_up.tiles, gate_up.factors, down.tiles, down.factors,
            routing.begins, routing.counts, routing.order, routing.weights, routing.progress[turn:],
            routing.progress[2:], *tensors, fewest, most, float(limit if limit > 0 else math.inf), overlap=True,
        )  # fmt: skip


def combine(like: jit.Kernel, down: Tensor, ids: Tensor, out: Tensor) -> None:
    """down [T * k, hidden] -> out float32 [T, hidden]."""
    tokens, hidden = out.shape
    parts = -(-hidden // 2560)
    threads = 32 * -(-hidden // (256 * parts))
    jit.kernel_like(like, "combine").launch((tokens, parts), threads, 0, down, ids, out, overlap=True)


def _pass(x: Tensor, weights: Tensor, ids: Tensor, experts: Experts[Product], limit: float, out: Tensor) -> None:
    tokens, topk = ids.shape
    kernels = [kernel(experts, tiling, topk) for tiling in (FEW, MANY)]
    like = kernels[0][0]
    routing = route(like, weights, ids, experts.down.tiles.shape[0])
    positions = routing.order.shape[0]
    gathered, h = (x.new_empty(positions, padded(channels)) for channels in (experts.hidden, experts.inner))
    down = x.new_empty(tokens * topk, experts.hidden)
    gather(like, x, routing, gathered)
    multiply(experts, routing, (FEW, MANY), kernels, ids.shape, (gathered, h, down), limit)
    combine(like, down, ids, out)


def padded(channels: int) -> int:
    return -(-channels // CHANNELS) * CHANNELS
