"""Hyper-connections: the mixing weights of a site, collapse and expansion of the M streams of a row.

hc_mix is two launches.

1. ``_mix_parts``: products of 64 rows with all (2+M)M rows of fn over a split of the K = M*H channels, on the tensor
   cores. fn is float32; it is taken apart into three bfloat16 that add up to it, so its products with bfloat16 streams
   are exact (TF32 would drop 13 bits of it). The squares of the streams are summed on the way, as one more column.
   At K = 20480 there are 64 splits of 320 channels: 256 rows make 256 programs, and a single row 64.
2. ``_mix_finish``: adds the splits, then gates and Sinkhorn rounds in the registers of one warp, two rows of 4x4.

The splits belong to groups of 16, and a row is the sum of its groups, each the sum of its splits in order. With
thousands of rows a program runs all splits of a group and only the groups go through memory: the same sums in the same
order, so the same bits.

hc_collapse and hc_expand: a program is 1024 channels of a row, each stream read once, 16 bytes a thread.

float32 streams, and all products in Triton's interpreter, are float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import INTERPRET, widen
from .linear import dot
from .norm_rope import inverse_rms, to_narrow, to_wide
from .overlap import OVERLAP, after_previous

SPLITS = 16  # of a group
MOST_SPLITS = 64
STEP = 64  # channels a split is a multiple of
MANY_ROWS = 4096  # from here on row tiles alone fill the GPU


@triton.jit
def _leading(x):
    """float32 -> its first 8 significant bits as bfloat16, and what is left of it as float32. Cut, not rounded."""
    bits = x.to(tl.int32, bitcast=True)
    high = (bits & -65536).to(tl.float32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), x - high


@triton.jit
def dot_float32(a, b, total):
    """As ``dot`` for a float32 b, whose 24 bits make three bfloat16; the smallest goes first."""
    if total.dtype == tl.float32:
        high, rest = _leading(b)
        middle, rest = _leading(rest)
        low, rest = _leading(rest)
        total = dot(a, low, total)
        total = dot(a, middle, total)
        total = dot(a, high, total)
    else:
        total = dot(a, b, total)
    return total


@triton.jit(do_not_specialize=["rows"])
def _mix_parts(
    streams,
    fn,
    parts,
    rows,
    K: tl.constexpr,
    MIXES: tl.constexpr,
    SPLIT: tl.constexpr,
    LOOPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One split (LOOPS = 1) or group of splits: parts[program, row] = products with fn, then the sum of squares."""
    after_previous()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    channel = tl.arange(0, BLOCK)
    x_at = streams + row.to(tl.int64)[:, None] * K + channel[None, :]
    fn_at = fn + column[:, None] * K + channel[None, :]
    total = tl.zeros((ROWS, COLUMNS), parts.dtype.element_ty)
    for loop in range(LOOPS):
        start = (tl.program_id(1) * LOOPS + loop) * SPLIT
        products = tl.zeros((ROWS, COLUMNS), parts.dtype.element_ty)
        squares = tl.zeros((ROWS, BLOCK), parts.dtype.element_ty)
        for k in range(start, start + SPLIT, BLOCK):
            there = (k + channel < K)[None, :]
            x = tl.load(x_at + k, mask=(row < rows)[:, None] & there, other=0.0)
            f = tl.load(fn_at + k, mask=(column < MIXES)[:, None] & there, other=0.0)
            wide = widen(x).to(parts.dtype.element_ty)
            squares += wide * wide
            products = dot_float32(x, f, products)
        total += tl.where(column[None, :] == MIXES, tl.sum(squares, axis=1)[:, None], products)
    out = parts + (tl.program_id(1).to(tl.int64) * rows + row[:, None]) * COLUMNS + column[None, :]
    tl.store(out, total, mask=(row < rows)[:, None])


@triton.constexpr_function
def power_of_2(n):
    """The next one. Not Triton's own: in a server SGLang has put a function in its place that kernels cannot call."""
    return 1 << (n - 1).bit_length()


@triton.jit
def _gather(parts, at, mask, rows, GROUPS: tl.constexpr, LOOPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum over groups of the sum over splits of the mixes ``at`` [1, ...] of a part."""
    group = tl.arange(0, power_of_2(GROUPS))
    if len(at.shape) == 2:
        group = group[:, None]
    elif len(at.shape) == 3:
        group = group[:, None, None]
    else:
        group = group[:, None, None, None]
    step = rows * COLUMNS
    mask = mask & (group < GROUPS)
    at = parts + group.to(tl.int64) * (LOOPS * step) + at
    total = tl.load(at, mask=mask, other=0.0)
    for loop in tl.static_range(1, LOOPS):
        total += tl.load(at + loop * step, mask=mask, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _without_overflow(squares, streams, row, live, K: tl.constexpr):
    """float64 sums of squares [ROWS]; where float32 gave infinity they are taken once more, in float64."""
    if tl.max(squares, axis=0) == float("inf"):
        channel = tl.arange(0, 128)[None, :]
        x_at = streams + row.to(tl.int64)[:, None] * K + channel
        exact = tl.zeros(squares.shape, tl.float64)
        for k in range(0, K, 128):
            x = widen(tl.load(x_at + k, mask=live[:, None] & (k + channel < K), other=0.0)).to(tl.float64)
            exact += tl.sum(x * x, axis=1)
        squares = tl.where(squares == float("inf"), exact, squares)
    return squares


@triton.jit(do_not_specialize=["rows"])
def _mix_finish(
    streams,
    parts,
    base,
    scale,
    pre,
    post,
    comb,
    rows,
    K: tl.constexpr,
    M: tl.constexpr,
    NORM_EPS: tl.constexpr,
    HC_EPS: tl.constexpr,
    ITERS: tl.constexpr,
    GROUPS: tl.constexpr,
    LOOPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
):
    after_previous()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    first = row.to(tl.int64) * COLUMNS

    at = (first + (2 + M) * M)[None, :]
    squares = _gather(parts, at, live[None, :], rows, GROUPS, LOOPS, COLUMNS).to(tl.float64)
    if parts.dtype.element_ty == tl.float32:
        squares = _without_overflow(squares, streams, row, live, K)
    inverse = inverse_rms(squares, K, NORM_EPS).to(parts.dtype.element_ty)

    stream = tl.arange(0, PADDED)
    mask = live[:, None] & (stream < M)[None, :]
    at = first[:, None] + stream[None, :]
    out = row.to(tl.int64)[:, None] * M + stream[None, :]
    mix = _gather(parts, at[None], mask[None], rows, GROUPS, LOOPS, COLUMNS) * inverse[:, None]
    shift = tl.load(base + stream, mask=stream < M, other=0.0)[None, :]
    tl.store(pre + out, (_sigmoid(mix * tl.load(scale) + shift) + HC_EPS).to(tl.float32), mask=mask)
    mix = _gather(parts, (at + M)[None], mask[None], rows, GROUPS, LOOPS, COLUMNS) * inverse[:, None]
    shift = tl.load(base + M + stream, mask=stream < M, other=0.0)[None, :]
    tl.store(post + out, (2.0 * _sigmoid(mix * tl.load(scale + 1) + shift)).to(tl.float32), mask=mask)

    source, target = stream[None, :, None], stream[None, None, :]
    real = (source < M) & (target < M)
    mask = live[:, None, None] & real
    pair = source * M + target
    at = first[:, None, None] + 2 * M + pair
    mix = _gather(parts, at[None], mask[None], rows, GROUPS, LOOPS, COLUMNS) * inverse[:, None, None]
    logits = mix * tl.load(scale + 2) + tl.load(base + 2 * M + pair, mask=real, other=0.0)
    logits = tl.where(real, logits, float("-inf"))
    weights = tl.where(real, tl.exp(logits - tl.max(logits, axis=2)[:, :, None]), 0.0)
    weights = tl.where(real, weights / tl.sum(weights, axis=2)[:, :, None] + HC_EPS, 0.0)
    weights = tl.where(real, weights * (1.0 / (tl.sum(weights, axis=1) + HC_EPS))[:, None, :], 0.0)
    for _ in range(ITERS - 1):
        weights = tl.where(real, weights * (1.0 / (tl.sum(weights, axis=2) + HC_EPS))[:, :, None], 0.0)
        weights = tl.where(real, weights * (1.0 / (tl.sum(weights, axis=1) + HC_EPS))[:, None, :], 0.0)
    tl.store(comb + row.to(tl.int64)[:, None, None] * M * M + pair, weights.to(tl.float32), mask=mask)


def hc_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows, m, h = streams.shape
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=streams.device)  # noqa: E731
    pre, post, comb = new(rows, m), new(rows, m), new(rows, m, m)
    if not rows:
        return pre, post, comb
    streams, k, mixes = streams.contiguous(), m * h, (2 + m) * m
    split = triton.cdiv(triton.cdiv(k, MOST_SPLITS), STEP) * STEP
    groups = triton.cdiv(triton.cdiv(k, split), SPLITS)
    wide = streams.dtype == torch.float32
    tile_rows, block = (8, 16) if wide and not INTERPRET.value else (64, STEP)
    columns = max(16, triton.next_power_of_2(mixes + 1))
    in_kernel, in_memory = (SPLITS, 1) if rows >= MANY_ROWS else (1, SPLITS)
    dtype = torch.float64 if wide or INTERPRET.value else torch.float32
    parts = new(groups * in_memory, rows, columns, dtype=dtype)
    _mix_parts[(triton.cdiv(rows, tile_rows), groups * in_memory)](
        streams,
        fn.contiguous(),
        parts,
        rows,
        k,
        mixes,
        split,
        in_kernel,
        tile_rows,
        columns,
        block,
        num_warps=4,
        num_stages=4,
        **OVERLAP,
    )
    tile_rows = max(1, 32 // triton.next_power_of_2(m) ** 2)  # a thread for each pair of streams
    _mix_finish[(triton.cdiv(rows, tile_rows),)](
        streams,
        parts,
        base.contiguous(),
        scale.contiguous(),
        pre,
        post,
        comb,
        rows,
        k,
        m,
        norm_eps,
        hc_eps,
        iters,
        groups,
        in_memory,
        tile_rows,
        columns,
        triton.next_power_of_2(m),
        num_warps=1,
        **OVERLAP,
    )
    return pre, post, comb


# ---- collapse and expand --------------------------------------------------------------------------------------------


@triton.jit
def _collapse(streams, pre, out, H: tl.constexpr, M: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, PADDED)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (stream < M)[:, None] & (channel < H)[None, :]
    x = to_wide(tl.load(streams + row * (M * H) + stream[:, None] * H + channel[None, :], mask=mask, other=0.0))
    weight = tl.load(pre + row * M + stream, mask=stream < M, other=0.0).to(x.dtype)
    result = tl.sum(weight[:, None] * x, axis=0)
    tl.store(out + row * H + channel, to_narrow(result, out.dtype.element_ty), mask=channel < H)


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    rows, m, h = streams.shape
    out = torch.empty(rows, h, dtype=streams.dtype, device=streams.device)
    if rows:
        block = min(1024, triton.next_power_of_2(h))
        grid = (rows, triton.cdiv(h, block))
        _collapse[grid](streams.contiguous(), pre.contiguous(), out, h, m, triton.next_power_of_2(m), block, **OVERLAP)
    return out


@triton.jit
def _expand(
    given, streams, post, comb, out, H: tl.constexpr, M: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr
):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, PADDED)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < H
    mask = (stream < M)[:, None] & there[None, :]
    at = row * (M * H) + stream[:, None] * H + channel[None, :]
    x = to_wide(tl.load(streams + at, mask=mask, other=0.0))
    new = to_wide(tl.load(given + row * H + channel, mask=there, other=0.0))
    for k in tl.static_range(M):
        weight = tl.load(comb + row * (M * M) + stream * M + k, mask=stream < M, other=0.0).to(x.dtype)
        result = tl.load(post + row * M + k).to(x.dtype) * new + tl.sum(weight[:, None] * x, axis=0)
        tl.store(out + row * (M * H) + k * H + channel, to_narrow(result, out.dtype.element_ty), mask=there)


def hc_expand(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    rows, m, h = streams.shape
    result = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    if rows:
        block = min(1024, triton.next_power_of_2(h))
        _expand[(rows, triton.cdiv(h, block))](
            out.contiguous(),
            streams.contiguous(),
            post.contiguous(),
            comb.contiguous(),
            result,
            h,
            m,
            triton.next_power_of_2(m),
            block,
            **OVERLAP,
        )
    return result
