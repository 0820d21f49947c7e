"""Products with FP8 weights: ``deep_gemm.fp8_fp4_gemm_nt``, which applies a UE8M0 scale per 32 channels in the tensor
cores. Both operands as they are, float32 sums, one rounding: the contract's own arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cuda import linear as triton_linear
from . import libraries
from .casts import cast_fp8, pack_scales

RECIPE = (1, 32)  # rows and channels of a scale, of either operand


@dataclass(frozen=True)
class Weight:
    values: Tensor  # e4m3 [N, K]
    scales: Tensor  # packed int32 [N, ceil(K/128)]
    wide: triton_linear.Weight  # for float32 activations, a profile for debugging


def prepare_linear(weight: Tensor, scale: Tensor) -> Weight:
    values = weight.contiguous()
    # 32 rows share a scale; the last tile may be cut.
    rows = -(-values.shape[0] // 32) * 32
    packed = pack_scales(scale, rows)[: values.shape[0]]
    return Weight(values, packed, triton_linear.prepare_linear(values, scale))


def linear(x: Tensor, weight: Weight) -> Tensor:
    if x.dtype == torch.float32:
        return triton_linear.linear(x, weight.wide)
    out = torch.empty(x.shape[0], weight.values.shape[0], dtype=x.dtype, device=x.device)
    if out.numel():
        operand = (weight.values, weight.scales)
        libraries.deep_gemm().fp8_fp4_gemm_nt(cast_fp8(x), operand, out, recipe_a=RECIPE, recipe_b=RECIPE)
    return out
