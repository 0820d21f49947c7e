"""RMSNorm and rotary positions.

RMSNorm: a program is a row, read once and held in registers; its channels are spread over one to eight warps. The sum
of squares is taken in float32 and again in float64 only where it overflows.

RoPE: a program is up to 16 heads of a row, whose rotated channels are loaded as pairs and stored where they were. The
angles of a row are the same for all its heads, so their sine and cosine are worked out in float64 from scratch: a table
would cost a lookup per position and the fast instructions are wrong beyond a few turns.

float32 activations are computed in float64 throughout, so that a result is rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import narrow, widen
from .overlap import OVERLAP, after_previous


@triton.jit
def to_wide(x):
    """An activation in the type it is computed in: bfloat16 -> float32, float32 -> float64."""
    return x.to(tl.float64) if x.dtype == tl.float32 else widen(x)


@triton.jit
def to_narrow(x, dtype: tl.constexpr):
    """The one rounding of a result: float32 -> bfloat16 or float64 -> float32."""
    return narrow(x.to(tl.float32), dtype)


@triton.jit
def square_sum(x):
    """Sum of squares of float32 or float64 [K] -> float64 scalar; infinite only if an x is."""
    if x.dtype == tl.float64:
        total = tl.sum(x * x, axis=0)
    else:
        total = tl.sum(x * x, axis=0).to(tl.float64)
        if total == float("inf"):
            wide = x.to(tl.float64)
            total = tl.sum(wide * wide, axis=0)
    return total


@triton.jit
def inverse_rms(total, SIZE: tl.constexpr, EPS: tl.constexpr):
    """float64 sum of SIZE squares -> 1 / sqrt(mean + EPS); NaN for an infinite sum, so the whole row shows it."""
    scale = 1.0 / tl.sqrt(total / SIZE + EPS)
    return tl.where(total == float("inf"), float("nan"), scale)


def warps(elements: int) -> int:
    """Warps of a program that holds so many elements: at most 32 a thread, 8 at a time."""
    return max(1, min(8, triton.next_power_of_2(elements) // 512))


@triton.jit
def _rms_norm(x, weight, out, stride, SIZE: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    there = columns < SIZE
    given = tl.load(x + row * stride + columns, mask=there, other=0.0)
    factor = to_wide(given)
    scale = inverse_rms(square_sum(factor), SIZE, EPS)
    by = widen(tl.load(weight + columns, mask=there, other=0.0))
    result = factor * scale.to(factor.dtype) * by
    tl.store(out + row * SIZE + columns, to_narrow(result, out.dtype.element_ty), mask=there)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        x = x if x.stride(1) == 1 else x.contiguous()
        block = triton.next_power_of_2(size)
        _rms_norm[(rows,)](
            x, weight.contiguous(), out, x.stride(0), size, eps, block, num_warps=warps(block), **OVERLAP
        )
    return out


# pi / 2 in three parts; a product of one of the first two (27 bits) with a whole number below 2^26 is exact.
HALF_PI_HIGH = tl.constexpr(1.570796325802803)
HALF_PI_MIDDLE = tl.constexpr(9.920935739593517e-10)
HALF_PI_LOW = tl.constexpr(5.721188726109832e-18)
TWO_OVER_PI = tl.constexpr(0.6366197723675814)


@triton.jit
def cos_sin(angle):
    """float32 radians -> cosine and sine, right to 1e-15 and rounded to float32."""
    wide = angle.to(tl.float64)
    turns = tl.floor(wide * TWO_OVER_PI + 0.5)
    rest = ((wide - turns * HALF_PI_HIGH) - turns * HALF_PI_MIDDLE) - turns * HALF_PI_LOW  # within pi / 4
    z = rest * rest
    # Taylor series, up to the 16th and 15th power.
    cos = z * (1 / 20922789888000) - 1 / 87178291200
    cos = cos * z + 1 / 479001600
    cos = cos * z - 1 / 3628800
    cos = cos * z + 1 / 40320
    cos = cos * z - 1 / 720
    cos = cos * z + 1 / 24
    cos = cos * z - 0.5
    cos = cos * z + 1.0
    sin = z * (-1 / 1307674368000) + 1 / 6227020800
    sin = sin * z - 1 / 39916800
    sin = sin * z + 1 / 362880
    sin = sin * z - 1 / 5040
    sin = sin * z + 1 / 120
    sin = sin * z - 1 / 6
    sin = sin * z * rest + rest
    quarter = turns.to(tl.int32) & 3  # a quarter turn is (cos, sin) -> (-sin, cos)
    odd = (quarter & 1) == 1
    turned_cos, turned_sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    turned_cos = tl.where((quarter == 1) | (quarter == 2), -turned_cos, turned_cos)
    turned_sin = tl.where(quarter >= 2, -turned_sin, turned_sin)
    return turned_cos.to(tl.float32), turned_sin.to(tl.float32)


@triton.jit
def _rope(
    x,
    positions,
    inv_freq,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    INVERSE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
    pair = tl.arange(0, PAIRS_BLOCK)
    position = tl.load(positions + row).to(tl.float32)
    cos, sin = cos_sin(position * tl.load(inv_freq + pair, mask=pair < PAIRS, other=0.0))
    if INVERSE:
        sin = -sin
    columns = tl.arange(0, 2 * PAIRS_BLOCK)[None, :]
    there = (heads < HEADS) & (columns < 2 * PAIRS)
    at = x + row * (HEADS * SIZE) + heads * SIZE + (SIZE - 2 * PAIRS) + columns
    pairs = to_wide(tl.load(at, mask=there, other=0.0))
    even, odd = tl.split(tl.reshape(pairs, (HEADS_BLOCK, PAIRS_BLOCK, 2)))
    cos, sin = cos[None, :].to(pairs.dtype), sin[None, :].to(pairs.dtype)
    turned = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (HEADS_BLOCK, 2 * PAIRS_BLOCK))
    tl.store(at, to_narrow(turned, x.dtype.element_ty), mask=there)


def rope(x: Tensor, positions: Tensor, inv_freq: Tensor, inverse: bool) -> Tensor:
    pairs, size = inv_freq.shape[0], x.shape[-1]
    if not x.numel() or not pairs:
        return x
    x = x.contiguous()
    heads = x[0].numel() // size
    block = min(16, triton.next_power_of_2(heads))
    padded = triton.next_power_of_2(pairs)
    _rope[(x.shape[0], triton.cdiv(heads, block))](
        x,
        positions.contiguous(),
        inv_freq.contiguous(),
        heads,
        size,
        pairs,
        inverse,
        block,
        padded,
        num_warps=warps(2 * block * padded),
        **OVERLAP,
    )
    return x
