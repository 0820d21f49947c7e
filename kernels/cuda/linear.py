"""Products with FP8 weights (32x32 scales), with bf16 weights, and the block-diagonal output projection.

FP8 and bf16 values with power-of-two scales are exact in bf16, so bf16 tensor cores multiply them exactly and sum in
float32: the model's own arithmetic.

Plan. An FP8 product first casts its activations FP8/32 and writes what is left of them as bf16 (``_cast``): done in
the product it would be repeated by every tile. ``_product`` computes a tile of outputs x rows, transposed: weights are
the left operand, whose tensor-core tile is 64 at least, so a few rows do not waste it. Weights stream from memory as
FP8 and are expanded in registers: shifts move exponent and mantissa of e4m3 to where bf16 has them, two packed products
apply the bias and the scale. A thread feeds the tensor cores channels 2q, 2q+1, 2q+8, 2q+9, .. of a block of 32, in
pieces of two bytes. The order of channels in a sum is free, so they are swapped (``_interleave``) to make those eight
one piece: the weight's in registers, which costs nothing, the activation's where it is cast.

Few outputs alone do not fill 132 multiprocessors, so K is split; how far depends on N and K only. The parts go through
memory and ``_reduce`` adds them in order. Many rows fill the GPU anyway: a program then runs all splits of its tile,
parks the sum of each, and adds them in the same order. From a thousand rows on arithmetic is the limit, and FP8 weights
are expanded to bf16 first (``_expand``). Whatever the tile, an output is the same chain of 16-channel tensor-core
steps, so its bits do not depend on how many rows there are.

float32 activations (and everything in Triton's interpreter) are summed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import MULTIPROCESSORS
from .formats import INTERPRET, e4m3_value, fp8_round_trip, narrow, to_bfloat16, widen
from .overlap import OVERLAP, after_previous

BLOCK = 32  # channels and outputs per scale
ENOUGH_PROGRAMS = 96  # of a large tile, before a smaller one is tried
SHORTEST_SPLIT = 512
MANY_ROWS = 1024  # from here on FP8 weights are expanded first
PARTS_BYTES = 64 << 20  # of parts that go through memory; more are summed tile by tile


@dataclass(frozen=True)
class Weight:
    """values: uint8 (e4m3) or bf16 [groups * outputs, channels]; scale: float32 [ceil(rows / 32), channels / 32].

    interleaved: whether the values are stored with the channels of each block swapped, see the plan.
    """

    values: Tensor
    scale: Tensor | None
    groups: int
    outputs: int  # of a group
    channels: int
    interleaved: bool = False

    @property
    def splits(self) -> int:
        """Parts the sum over channels has: two programs a multiprocessor, but few parts where they are large."""
        tiles = self.groups * triton.cdiv(self.outputs, 64)
        most = 3 if tiles > 32 else self.channels // SHORTEST_SPLIT
        return max(1, min(most, (2 * MULTIPROCESSORS - 12) // tiles, self.channels // SHORTEST_SPLIT))


class Tile(NamedTuple):
    outputs: int
    rows: int
    channels: int  # of a step
    warps: int
    stages: int


# ---- device functions -----------------------------------------------------------------------------------------------


@triton.jit
def dot(a, b, total):
    """total + a [M, K] times b [N, K] transposed: tensor cores for a float32 total, plain float64 sums otherwise."""
    if total.dtype == tl.float32:
        total = tl.dot(a, tl.trans(b), total)
    elif INTERPRET:
        total += tl.dot(widen(a).to(tl.float64), tl.trans(widen(b).to(tl.float64)), out_dtype=tl.float64)
    else:
        total += tl.sum(a.to(tl.float64)[:, None, :] * b.to(tl.float64)[None, :, :], axis=2)
    return total


@triton.jit
def _dequant_bfloat16(values, scale):
    """e4m3 bytes and a bf16 scale each -> bf16. NaN bytes are not looked at: their tile has a NaN scale."""
    if INTERPRET:
        out = to_bfloat16(e4m3_value(values) * widen(scale))
    else:
        out = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, body, bias;
            mov.b32 bias, 0x7B807B80;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            shr.b32 body, low, 4;
            and.b32 body, body, 0x07F007F0;
            lop3.b32 low, low, 0x80008000, body, 0xEA;
            shr.b32 body, high, 4;
            and.b32 body, body, 0x07F007F0;
            lop3.b32 high, high, 0x80008000, body, 0xEA;
            mul.rn.bf16x2 low, low, bias;
            mul.rn.bf16x2 high, high, bias;
            mul.rn.bf16x2 $0, low, $3;
            mul.rn.bf16x2 $1, high, $4;
            }
            """,
            "=r,=r,r,r,r",
            [values, scale],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return out


@triton.jit
def _interleave(x):
    """Swap channel 8a + 2b + c of each block [N, B, 32] with channel 8b + 2a + c; twice is no change."""
    n: tl.constexpr = x.shape[0]
    b: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, (n, b, 4, 4, 2)), (0, 1, 3, 2, 4)), (n, b, 32))


@triton.jit
def _dequant(values, scale, INTERLEAVE: tl.constexpr, dtype: tl.constexpr):
    """e4m3 bytes [N, B, 32], float32 scales [N, B] -> bf16 or float32 [N, B * 32], exact."""
    if dtype == tl.bfloat16:
        out = _dequant_bfloat16(values, tl.broadcast_to(to_bfloat16(scale)[:, :, None], values.shape))
    else:
        out = e4m3_value(values) * scale[:, :, None]
    out = _interleave(out) if INTERLEAVE else out
    return tl.reshape(out, (values.shape[0], values.shape[1] * 32))


# ---- kernels --------------------------------------------------------------------------------------------------------


@triton.jit
def _cast(x, out, size, INTERLEAVE: tl.constexpr, CHANNELS: tl.constexpr):
    """What FP8/32 leaves of bf16 x; rows are multiples of 32 long, so they need not be told apart."""
    after_previous()
    at = tl.program_id(0).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    given = widen(tl.load(x + at, mask=at < size, other=0.0))
    left = to_bfloat16(fp8_round_trip(given))
    if INTERLEAVE:
        left = tl.reshape(_interleave(tl.reshape(left, (1, CHANNELS // 32, 32))), (1, CHANNELS))
    tl.store(out + at, left, mask=at < size)


@triton.jit
def _expand(values, scale, out, rows, K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """FP8 weight [rows, K] -> bf16, channels swapped as the product wants them."""
    after_previous()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    mask = (row < rows)[:, None] & (block < K // 32)[None, :]
    at = row.to(tl.int64)[:, None, None] * K + block[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    factor = tl.load(scale + (row // 32)[:, None] * (K // 32) + block[None, :], mask=mask, other=0.0)
    given = tl.load(values + at, mask=mask[:, :, None], other=0)
    factor = tl.broadcast_to(to_bfloat16(factor)[:, :, None], given.shape)
    tl.store(out + at, _interleave(_dequant_bfloat16(given, factor)), mask=mask[:, :, None])


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    weight,
    scale,
    out,
    parked,
    rows,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FP8: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    SPLIT: tl.constexpr,
    LOOPS: tl.constexpr,
    TOTAL: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """out[part, row, group * N + output]: LOOPS consecutive splits of SPLIT channels each.

    parked: [tiles, LOOPS - 1, OUTPUTS, ROWS], where the sums of a tile's splits wait for the last one.
    Program ids go through the row tiles first, up to 8 of them, so that programs that share a weight tile run together
    and a band of rows stays in the cache.
    """
    after_previous()
    tile, part = tl.program_id(0), tl.program_id(1)
    n_tiles: tl.constexpr = (N + OUTPUTS - 1) // OUTPUTS
    band: tl.constexpr = 8 * n_tiles * GROUPS
    first = tile // band * 8
    high = min(tl.cdiv(rows, ROWS) - first, 8)
    row = (first + tile % band % high) * ROWS + tl.arange(0, ROWS)
    n_tile = tile % band // high
    group = n_tile // n_tiles
    output = n_tile % n_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    weight_row = group * N + output
    real_row, real_output = (row < rows)[:, None], output < N
    even: tl.constexpr = K % CHANNELS == 0

    channel = tl.arange(0, CHANNELS)
    x_at = x + row.to(tl.int64)[:, None] * (GROUPS * K) + group * K + channel[None, :]
    if FP8:
        block = tl.arange(0, CHANNELS // 32)
        w_at = weight + weight_row.to(tl.int64)[:, None, None] * K
        w_at += block[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
        scale_at = scale + (weight_row // 32)[:, None] * (K // 32) + block[None, :]
    else:
        w_at = weight + weight_row.to(tl.int64)[:, None] * K + channel[None, :]

    kept = parked
    if LOOPS > 1:
        kept += tile.to(tl.int64) * ((LOOPS - 1) * OUTPUTS * ROWS)
        kept += tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    total = tl.zeros((OUTPUTS, ROWS), TOTAL)
    for loop in range(LOOPS):
        start = (part * LOOPS + loop) * SPLIT
        total = tl.zeros((OUTPUTS, ROWS), TOTAL)
        for k in range(start, tl.minimum(start + SPLIT, K), CHANNELS):
            there = real_row if even else real_row & (k + channel < K)[None, :]
            right = tl.load(x_at + k, mask=there, other=0.0)
            if FP8:
                there = real_output[:, None] if even else real_output[:, None] & (k + block * 32 < K)[None, :]
                factor = tl.load(scale_at + k // 32, mask=there, other=0.0)
                given = tl.load(w_at + k, mask=there[:, :, None], other=0)
                left = _dequant(given, factor, INTERLEAVE, x.dtype.element_ty)
            else:
                there = real_output[:, None] if even else real_output[:, None] & (k + channel < K)[None, :]
                left = tl.load(w_at + k, mask=there, other=0.0)
            total = dot(left, right, total)
        if LOOPS > 1:
            more = loop < LOOPS - 1
            if more:
                tl.store(kept + loop * (OUTPUTS * ROWS), total)
    if LOOPS > 1:
        tl.debug_barrier()  # a value is not always read by the thread that wrote it
        earlier = tl.zeros((OUTPUTS, ROWS), TOTAL)
        for loop in tl.static_range(LOOPS - 1):
            earlier += tl.load(kept + loop * (OUTPUTS * ROWS))
        total = earlier + total

    column = group * N + output
    at = (part.to(tl.int64) * rows + row[:, None]) * (GROUPS * N) + column[None, :]
    result = tl.trans(total)
    if out.dtype.element_ty == tl.bfloat16:
        result = to_bfloat16(result.to(tl.float32))
    tl.store(out + at, result.to(out.dtype.element_ty), mask=real_row & real_output[None, :])


@triton.jit
def _reduce(parts, out, size, PARTS: tl.constexpr, ELEMENTS: tl.constexpr):
    after_previous()
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    total = tl.zeros((ELEMENTS,), parts.dtype.element_ty)
    for _ in tl.static_range(PARTS):
        total += tl.load(parts + at, mask=at < size, other=0.0)
        parts += size
    tl.store(out + at, narrow(total.to(tl.float32), out.dtype.element_ty), mask=at < size)


# ---- launches -------------------------------------------------------------------------------------------------------


def _tile(weight: Weight, rows: int, parts: int, wide: bool) -> Tile:
    """Tile of a product; the result does not depend on it. The largest that makes enough programs."""
    if INTERPRET.value:
        return Tile(64, 64, 64, 4, 1)
    if wide:
        return Tile(16, 8, 32, 4, 1)
    step = 128 if weight.scale is not None else 64
    if rows <= 32:
        return Tile(64, 16 if rows <= 16 else 32, 128, 4, 4)
    if rows <= 64:
        tiles = [Tile(128, 64, step, 8, 4), Tile(64, 64, step, 4, 4)]
    else:
        tiles = [Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 8, 4), Tile(64, 128, 64, 4, 4)]
        tiles = tiles[rows <= 128 :]
    for tile in tiles:
        if tile.outputs <= weight.outputs and _programs(weight, rows, tile) * parts >= ENOUGH_PROGRAMS:
            return tile
    return tiles[-1]


def _programs(weight: Weight, rows: int, tile: Tile) -> int:
    return triton.cdiv(rows, tile.rows) * triton.cdiv(weight.outputs, tile.outputs) * weight.groups


def _launch(x: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """Sums of products [parts, T, groups * outputs]; a single part is of ``dtype`` if given, others are not rounded."""
    rows, k, columns = x.shape[0], weight.channels, weight.groups * weight.outputs
    wide = x.dtype == torch.float32
    total = torch.float64 if wide or INTERPRET.value else torch.float32
    split = triton.cdiv(triton.cdiv(k, weight.splits), 128) * 128
    splits = triton.cdiv(k, split)
    park = splits > 1 and not wide and splits * rows * columns * total.itemsize > PARTS_BYTES
    loops, parts = (splits, 1) if park else (1, splits)
    if rows >= MANY_ROWS and not wide:
        weight = _expanded(weight)
    tile = _tile(weight, rows, parts, wide)
    programs = _programs(weight, rows, tile)
    out = torch.empty(parts, rows, columns, dtype=dtype if dtype and parts == 1 else total, device=x.device)
    parked = None
    if park:
        parked = torch.empty(programs, loops - 1, tile.outputs, tile.rows, dtype=total, device=x.device)
    _product[(programs, parts)](
        x,
        weight.values,
        weight.scale,
        out,
        parked,
        rows,
        weight.groups,
        weight.outputs,
        k,
        weight.scale is not None,
        weight.interleaved or not wide,
        split,
        loops,
        tl.float64 if total == torch.float64 else tl.float32,
        tile.outputs,
        tile.rows,
        tile.channels,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **OVERLAP,
    )
    return out


def _expanded(weight: Weight) -> Weight:
    """The same weight in bf16, channels in the order the product wants."""
    if weight.scale is None:
        return weight
    rows, k = weight.values.shape
    values = torch.empty(rows, k, dtype=torch.bfloat16, device=weight.values.device)
    tile, blocks = 16, 8
    grid = (triton.cdiv(rows, tile), triton.cdiv(k, blocks * BLOCK))
    _expand[grid](weight.values, weight.scale, values, rows, k, tile, blocks, **OVERLAP)
    return replace(weight, values=values, scale=None)


def partial_products(x: Tensor, weight: Weight) -> Tensor:
    """x [T, K] times weight [N, K] transposed, as float32 or float64 [parts, T, N] that add up to it in order."""
    return _launch(x.contiguous(), weight)


def _multiply(x: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """x [T, groups, K] contiguous -> [T, groups * outputs] of ``dtype``."""
    rows, columns = x.shape[0], weight.groups * weight.outputs
    if not rows or not columns:
        return torch.empty(rows, columns, dtype=dtype, device=x.device)
    parts = _launch(x, weight, dtype)
    if parts.shape[0] == 1:
        return parts[0]
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    elements = 1024
    _reduce[(triton.cdiv(out.numel(), elements),)](parts, out, out.numel(), parts.shape[0], elements, **OVERLAP)
    return out


def round_trip(x: Tensor, interleave: bool = False) -> Tensor:
    out = torch.empty_like(x)
    channels = 2048
    if x.numel():
        _cast[(triton.cdiv(x.numel(), channels),)](x, out, x.numel(), interleave, channels, **OVERLAP)
    return out


# ---- ops ------------------------------------------------------------------------------------------------------------


def prepare_linear(weight: Tensor, scale: Tensor) -> Weight:
    values, factor = weight.contiguous().view(torch.uint8), scale.to(torch.float32)
    return Weight(values, poisoned(values, factor), 1, *weight.shape)


def linear(x: Tensor, weight: Weight) -> Tensor:
    x = x.contiguous()
    if x.dtype == torch.bfloat16:
        x = round_trip(x, interleave=True)
    return _multiply(x, weight, x.dtype)


def prepare_dense(weight: Tensor) -> Weight:
    return Weight(weight.contiguous(), None, 1, *weight.shape)


def dense(x: Tensor, weight: Weight, out_dtype: torch.dtype | None) -> Tensor:
    return _multiply(x.contiguous(), weight, out_dtype or x.dtype)


def prepare_grouped(weight: Tensor, scale: Tensor, groups: int) -> Weight:
    rows, k = weight.shape
    given = weight.contiguous().view(torch.uint8)
    # What it multiplies is not always cast, so there is nobody to swap its channels: the weight's are, here.
    values = given.view(rows, k // BLOCK, 4, 4, 2).transpose(2, 3).reshape(rows, k)
    return Weight(values, poisoned(values, scale.to(torch.float32)), groups, rows // groups, k, True)


def grouped_linear(o: Tensor, weight: Weight, fp8: bool) -> Tensor:
    o = o.contiguous()
    if not fp8:
        return _multiply(o, weight, o.dtype)
    return round_trip(_multiply(round_trip(o), weight, o.dtype))


def poisoned(values: Tensor, scale: Tensor) -> Tensor:
    """Scales, NaN where a tile holds a NaN weight: expanding a weight does not look for them."""
    n, k = values.shape
    bad = ((values & 0x7F) == 0x7F).view(n, k // BLOCK, BLOCK).any(-1)
    padded = torch.zeros(scale.shape[0] * BLOCK, k // BLOCK, dtype=torch.bool, device=values.device)
    padded[:n] = bad
    return scale.masked_fill(padded.view(-1, BLOCK, k // BLOCK).any(1), torch.nan)
