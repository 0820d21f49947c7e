"""The gate (torch_npu's, whose third norm is sqrt(softplus)) and SwiGLU.

torch_npu has SwiGLU fused with products and casts, but none that clamps, takes a routing weight and rounds where the
contract does; here it is plain float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .linear import wide_product
from .vendor import op

_SQRT_SOFTPLUS = 2


def moe_gate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    bias_vl: Tensor | None,
    image_mask: Tensor | None,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    if x.shape[0] == 0:
        return x.new_empty(0, topk, dtype=torch.float32), x.new_empty(0, topk, dtype=torch.int64)
    logits = wide_product(x, weight)
    weights, ids = _choose(logits, bias, topk, scale)
    if bias_vl is not None and image_mask is not None:
        other_weights, other_ids = _choose(logits, bias_vl, topk, scale)
        image = image_mask[:, None]
        weights, ids = torch.where(image, other_weights, weights), torch.where(image, other_ids, ids)
    return weights, ids


def _choose(logits: Tensor, bias: Tensor, topk: int, scale: float) -> tuple[Tensor, Tensor]:
    weights, ids, _ = op("npu_moe_gating_top_k")(
        logits,
        topk,
        bias=bias,
        k_group=1,
        group_count=1,
        norm_type=_SQRT_SOFTPLUS,
        routed_scaling_factor=scale,
        eps=1e-20,
    )
    ids = ids.to(torch.int64)
    if topk == 1:  # nothing to weigh against: the score itself
        weights = torch.sqrt(torch.nn.functional.softplus(logits)).gather(1, ids) * scale
    return weights.to(torch.float32), ids


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Tensor:
    dtype = gate.dtype
    gate, up = gate.to(torch.float32), up.to(torch.float32)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out = gate * torch.sigmoid(gate) * up
    if weight is not None:
        out = out * weight[:, None]
    return out.to(dtype)
