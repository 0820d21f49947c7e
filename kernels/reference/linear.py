"""Matrix products: FP8 weights with 32x32 scales, bf16 weights, and the block-diagonal output projection."""

from __future__ import annotations

import torch
from torch import Tensor

from . import formats
from .numeric import Weight


def prepare_linear(weight: Tensor, scale: Tensor) -> Weight:
    return _fp8_weight(weight, scale, 0, weight.shape[0])


def _fp8_weight(weight: Tensor, scale: Tensor, first: int, rows: int) -> Weight:
    """Rows first .. first+rows-1. Slabs need not start on a scale row, so scales are looked up row by row."""

    def load(part: slice) -> Tensor:
        ids = torch.arange(first + part.start, first + part.stop, device=weight.device)
        row_scale = formats.e8m0_value(scale)[ids // formats.BLOCK]
        values = weight[first + part.start : first + part.stop].to(torch.float32)
        return values * row_scale.repeat_interleave(formats.BLOCK, -1)[:, : weight.shape[1]]

    return Weight(rows, weight.shape[1], load)


def activation(x: Tensor) -> Tensor:
    """The left operand of a product with FP8 or FP4 weights: bf16 is cast FP8/32, float32 stays as it is."""
    return formats.fp8_round_trip(x).to(torch.float64) if x.dtype == torch.bfloat16 else x


def linear(x: Tensor, weight: Weight) -> Tensor:
    return weight.multiply(activation(x)).to(x.dtype)


def prepare_dense(weight: Tensor) -> Weight:
    return Weight(weight.shape[0], weight.shape[1], lambda part: weight[part])


def dense(x: Tensor, weight: Weight, out_dtype: torch.dtype | None) -> Tensor:
    return weight.multiply(x).to(out_dtype or x.dtype)


def prepare_grouped(weight: Tensor, scale: Tensor, groups: int) -> list[Weight]:
    rows = weight.shape[0] // groups
    return [_fp8_weight(weight, scale, group * rows, rows) for group in range(groups)]


def grouped_linear(o: Tensor, weights: list[Weight], fp8: bool) -> Tensor:
    if fp8:
        o = formats.fp8_round_trip(o).to(torch.float64)
    out = torch.cat([weight.multiply(o[:, group]) for group, weight in enumerate(weights)], -1)
    if not fp8:
        return out.to(o.dtype)
    return formats.fp8_round_trip(out.to(torch.bfloat16)).to(torch.bfloat16)
