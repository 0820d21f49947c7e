"""Products with FP8 weights, fast class (``fp8_linear_fast.cu``): FP8 tensor cores, bfloat16 activations only.

It casts its input where the exact class does. Beyond that:

* The products of 128 channels are added with some 14 bits, then in float32.
* A token's FP8/32 values have one scale for 128 channels, and so have the weights of 32 rows there: they are rounded to
  multiples of 2^-9 of it, an error of less than 2^-17 of the largest value there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import fp8_linear
from . import linear as triton_linear
from .fp8_linear import ROWS, Class, Weight, multiply, tileable

CHANNELS = 128
FAST = Class("fp8_linear_fast.cu", CHANNELS, ROWS * CHANNELS + 16, CHANNELS + 4, loops_width=128, most_splits=4,
             columns=128, swizzled=True)  # fmt: skip


def pack(weight: Tensor, scale: Tensor, groups: int) -> Weight:
    """weight e4m3 [groups * N, K], scale UE8M0 [groups * N / 32, K / 32]; N a multiple of 32 unless it is one group."""
    rows, k = weight.shape
    outputs = rows // groups
    blocks, tiles, per_group = -(-outputs // ROWS), -(-k // CHANNELS), -(-outputs // 32)
    packed = torch.empty(groups, blocks, tiles, FAST.tile_bytes, dtype=torch.uint8, device=weight.device)
    if weight.is_meta:  # only shapes are asked for
        return Weight(packed, groups, outputs, k, FAST)
    factors = triton_linear.poisoned(weight.contiguous().view(torch.uint8), scale.to(torch.float32))
    eight = torch.arange(8, device=weight.device)
    swizzle = (eight[:, None] ^ eight)[None, None, None, :, :, None]  # of a row, which piece comes where
    for group in range(groups):  # one at a time, for the memory of the copies
        scales = torch.zeros(blocks * ROWS // 32, tiles * CHANNELS // 32, device=weight.device)
        scales[:per_group, : k // 32] = factors[group * per_group : (group + 1) * per_group]
        values = torch.zeros(blocks * ROWS, tiles * CHANNELS, device=weight.device)
        values[:outputs, :k] = weight[group * outputs : (group + 1) * outputs].float()
        values = values.view(-1, 32, scales.shape[1], 32)
        scales.masked_fill_((values == 0).all(3).all(1) & ~scales.isnan(), 0)  # a block of zeros may have any scale
        common = scales.unflatten(1, (tiles, 4)).amax(-1)  # NaN if one is
        ratio = (scales / common.repeat_interleave(4, 1)).nan_to_num(0)
        codes = (values * ratio[:, None, :, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        # outputs: block, sixteen, q, two, one; channels: tile, piece of 16, one
        fields = codes.view(blocks, 8, 4, 2, 2, tiles, 8, 16).permute(0, 5, 1, 3, 2, 4, 6, 7)
        fields = fields.reshape(blocks, tiles, 16, 8, 8, 16).take_along_dim(swizzle, 4)
        packed[group, ..., : ROWS * CHANNELS] = fields.reshape(blocks, tiles, -1)
        tail = common.view(blocks, 4, tiles).transpose(1, 2).contiguous()
        packed[group, ..., ROWS * CHANNELS :] = tail.view(torch.uint8)
    return Weight(packed, groups, outputs, k, FAST)


def prepare_linear(weight: Tensor, scale: Tensor) -> Weight | triton_linear.Weight:
    return prepare_grouped(weight, scale, 1)


def prepare_grouped(weight: Tensor, scale: Tensor, groups: int) -> Weight | triton_linear.Weight:
    if tileable(weight, groups):
        return pack(weight, scale, groups)
    return fp8_linear.prepare_grouped(weight, scale, groups)


def linear(x: Tensor, weight: Weight | triton_linear.Weight) -> Tensor:
    """
    Raises:
        ValueError: activations that are not bfloat16.
    """
    if isinstance(weight, triton_linear.Weight):
        return triton_linear.linear(x, weight)
    if x.dtype != torch.bfloat16:
        raise ValueError(f"linear of cuda-fast takes bfloat16 activations, not {x.dtype}")
    return multiply(x.contiguous(), weight, cast=True)


def grouped_linear(o: Tensor, weight: Weight | triton_linear.Weight, fp8: bool) -> Tensor:
    """
    Raises:
        ValueError: activations that are not bfloat16, or not to be cast.
    """
    if isinstance(weight, triton_linear.Weight):
        return triton_linear.grouped_linear(o, weight, fp8)
    if o.dtype != torch.bfloat16 or not fp8:
        raise ValueError(f"grouped_linear of cuda-fast casts bfloat16 activations, not {o.dtype} with fp8={fp8}")
    return triton_linear.round_trip(multiply(o.contiguous().flatten(1), weight, cast=True))
