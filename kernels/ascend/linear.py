"""Matrix products: FP8 weights as MXFP8, bf16 weights, and the block-diagonal output projection.

bf16 activations run on torch_npu's MXFP8 products. float32 activations, a debugging profile, and float32 results are
plain float32 products; the platform switches HF32 off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import formats
from .vendor import E8M0, op

SLAB_BYTES = 256 << 20  # float32 copies of weight rows made at a time


@dataclass
class Fp8Weight:
    """weight e4m3 [N, K], scale UE8M0 [ceil(N/32), K/32]; ``pairs`` uint8 [ceil(K/64), N, 2]: the scales as the product
    reads them, one per row and 32 channels, two and two."""

    weight: Tensor
    scale: Tensor
    pairs: Tensor


def pair_scales(scale: Tensor) -> Tensor:
    """Bytes [..., K/32] -> [..., ceil(K/64), 2]; an odd last one is paired with 2^-127, which multiplies nothing."""
    if scale.shape[-1] % 2:
        scale = F.pad(scale, (0, 1))
    return scale.unflatten(-1, (-1, 2)).contiguous()


def prepare_linear(weight: Tensor, scale: Tensor) -> Fp8Weight:
    rows = scale.view(torch.uint8).repeat_interleave(formats.BLOCK, 0)[: weight.shape[0]]
    return Fp8Weight(weight, scale, pair_scales(rows).transpose(0, 1))


def linear(x: Tensor, w: Fp8Weight) -> Tensor:
    if x.shape[0] == 0:
        return x.new_empty(0, w.weight.shape[0])
    if x.dtype == torch.float32:
        return F.linear(x, formats.fp8_weight_dequant(w.weight, w.scale))
    values, scale = formats.mx_quant(x)
    return op("npu_quant_matmul")(
        values,
        w.weight.t(),  # a view: the product reads its columns in a row of memory each
        w.pairs,
        scale_dtype=E8M0,
        pertoken_scale=scale,
        pertoken_scale_dtype=E8M0,
        output_dtype=torch.bfloat16,
        group_sizes=[1, 1, formats.BLOCK],
    )


def prepare_dense(weight: Tensor) -> Tensor:
    return weight


def dense(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    out_dtype = out_dtype or x.dtype
    if x.dtype == out_dtype == torch.bfloat16:
        return F.linear(x, weight)
    return wide_product(x, weight).to(out_dtype)


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times weight [N, K] in float32, some rows of the weight at a time."""
    x = x.to(torch.float32)
    step = max(1, SLAB_BYTES // (4 * weight.shape[1]))
    parts = [F.linear(x, part.to(torch.float32)) for part in weight.split(step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


@dataclass
class GroupedWeight:
    """``wide`` bf16 [G, K, N], or float32 where bf16 does not hold every weight; ``narrow`` e4m3 [G, K, N] with
    ``pairs`` uint8 [G, K/64, N, 2]."""

    wide: Tensor
    narrow: Tensor
    pairs: Tensor


def prepare_grouped(weight: Tensor, scale: Tensor, groups: int) -> GroupedWeight:
    wide = formats.fp8_weight_dequant(weight, scale).unflatten(0, (groups, -1)).transpose(1, 2).contiguous()
    rows = scale.view(torch.uint8).repeat_interleave(formats.BLOCK, 0)[: weight.shape[0]]
    pairs = pair_scales(rows).unflatten(0, (groups, -1)).transpose(1, 2).contiguous()
    narrow = weight.view(torch.uint8).unflatten(0, (groups, -1)).transpose(1, 2).contiguous().view(weight.dtype)
    # e4m3 times a power of two: exact in bf16 but for scales at the end of its range.
    return GroupedWeight(wide.to(torch.bfloat16), narrow, pairs)


def grouped_linear(o: Tensor, w: GroupedWeight, fp8: bool) -> Tensor:
    rows = o.shape[0]
    if rows == 0:
        return o.new_empty(0, w.wide.shape[0] * w.wide.shape[2])
    if not fp8:
        out = torch.bmm(o.transpose(0, 1), w.wide.to(o.dtype))
        return out.transpose(0, 1).reshape(rows, -1)
    values, scale = formats.mx_quant(o)
    out = op("npu_transpose_quant_batchmatmul")(
        values,
        w.narrow,
        dtype=torch.bfloat16,
        x1_scale=scale.view(torch.float8_e8m0fnu),
        x2_scale=w.pairs.view(torch.float8_e8m0fnu),
        group_sizes=[0, 0, formats.BLOCK],
        perm_x1=[1, 0, 2],
        perm_x2=[0, 1, 2],
        perm_y=[1, 0, 2],
    )
    return formats.fp8_dequant(*formats.fp8_cast(out.reshape(rows, -1))).to(torch.bfloat16)
