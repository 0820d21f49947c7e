"""The routed experts: MXFP4 weights times MXFP8 activations in torch_npu's grouped products.

Pairs of token and expert are sorted by expert on the device; how many an expert has never reaches the host. Pairs of
other ranks' experts (id -1) sort last, belong to no group and add nothing; a rank may have none at all. The product
fused with SwiGLU is not used: it casts without the routing weight and without the contract's rounding of gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import formats
from .gate import swiglu
from .linear import pair_scales
from .vendor import E2M1_PAIR, E8M0, FRACTAL_NZ, op


@dataclass
class Experts:
    """w uint8 packed e2m1, s UE8M0 as given; ``narrow`` and ``pairs`` in the layout of the grouped product. Both are
    kept: torch_npu documents no cast of FP4 back from the fractal layout, and experts that move are read."""

    w13: Tensor
    s13: Tensor
    w2: Tensor
    s2: Tensor
    narrow13: Tensor
    pairs13: Tensor
    narrow2: Tensor
    pairs2: Tensor


def prepare_experts(w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> Experts:
    return Experts(w13, s13, w2, s2, *_layout(w13, s13), *_layout(w2, s2))


def replace_expert(experts: Experts, slot: int, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> None:
    for stored, new in zip(read_expert(experts, slot), (w13, s13, w2, s2), strict=True):
        stored.copy_(new)
    for narrow, pairs, packed, scale in (
        (experts.narrow13, experts.pairs13, w13, s13),
        (experts.narrow2, experts.pairs2, w2, s2),
    ):
        fractal, paired = _layout(packed[None], scale[None])
        narrow[slot].copy_(fractal[0])
        pairs[slot].copy_(paired[0])


def read_expert(experts: Experts, slot: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return experts.w13[slot], experts.s13[slot], experts.w2[slot], experts.s2[slot]


def _layout(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [E, N, K/2] in fractal layout, seen as [E, K/2, N], and scales uint8 [E, ceil(K/64), N, 2]."""
    fractal = op("npu_format_cast")(
        packed.contiguous(), FRACTAL_NZ, customize_dtype=torch.float8_e4m3fn, input_dtype=E2M1_PAIR
    )
    return fractal.transpose(1, 2), pair_scales(scale.view(torch.uint8)).transpose(1, 2)


def _grouped(values: Tensor, scale: Tensor, narrow: Tensor, pairs: Tensor, ends: Tensor) -> Tensor:
    """e4m3 [P, K] with scales, rows of an expert together, ends int64 [E] -> bf16 [P, N]; rows beyond the last end
    undefined."""
    return op("npu_grouped_matmul")(
        [values],
        [narrow],
        antiquant_scale=[pairs],
        per_token_scale=[scale],
        group_list=ends,
        group_list_type=0,
        group_type=0,
        split_item=2,
        output_dtype=torch.bfloat16,
        weight_dtype=E2M1_PAIR,
        per_token_scale_dtype=E8M0,
    )[0]


def moe_experts(x: Tensor, weights: Tensor, ids: Tensor, experts: Experts, limit: float) -> Tensor:
    tokens, topk = ids.shape
    count, hidden = experts.w13.shape[0], x.shape[1]
    if tokens == 0:
        return x.new_zeros(0, hidden, dtype=torch.float32)
    flat = torch.where(ids < 0, count, ids).flatten()
    order = torch.sort(flat, stable=True).indices
    sorted_ids = flat.index_select(0, order)
    mine = (sorted_ids < count)[:, None]
    ends = (flat[:, None] <= torch.arange(count, device=x.device)).to(torch.int64).sum(0)
    token = order // topk
    routing = weights.flatten().index_select(0, order)
    if x.dtype == torch.bfloat16:
        values, scale = formats.mx_quant(x)  # once a token, not once a pair
        values = values.view(torch.uint8).index_select(0, token).view(torch.float8_e4m3fn)
        inner = _grouped(values, scale.index_select(0, token), experts.narrow13, experts.pairs13, ends)
        half = inner.shape[1] // 2
        # Rows of no group hold what lay in memory.
        inner = torch.where(mine, swiglu(inner[:, :half], inner[:, half:], limit, routing), 0.0)
        down = _grouped(*formats.mx_quant(inner), experts.narrow2, experts.pairs2, ends)
    else:
        inner = _one_by_one(x.index_select(0, token), experts.w13, experts.s13, sorted_ids)
        half = inner.shape[1] // 2
        down = _one_by_one(swiglu(inner[:, :half], inner[:, half:], limit, routing), experts.w2, experts.s2, sorted_ids)
    down = torch.where(mine, down, 0.0)
    # Back to [token, choice], each token's choices in ascending expert id, then added in float32 one by one.
    place = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=x.device))
    by_expert = torch.sort(place.view(tokens, topk), dim=-1).values
    total = down.index_select(0, by_expert[:, 0]).to(torch.float32)
    for j in range(1, topk):
        total = total + down.index_select(0, by_expert[:, j]).to(torch.float32)
    return total


def _one_by_one(x: Tensor, packed: Tensor, scale: Tensor, expert_of_row: Tensor) -> Tensor:
    """float32 activations, a debugging profile: every expert sees every row, and keeps its own."""
    out = x.new_zeros(x.shape[0], packed.shape[1])
    for expert in range(packed.shape[0]):
        weight = formats.index_dequant(packed[expert], scale[expert])
        own = (expert_of_row == expert)[:, None]
        out = torch.where(own, torch.nn.functional.linear(x, weight), out)
    return out
