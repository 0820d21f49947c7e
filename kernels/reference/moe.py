"""Mixture of experts: the gate, SwiGLU, and the routed MXFP4 experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import formats
from .linear import activation
from .numeric import Weight, sigmoid


def moe_gate(
    x: Tensor,
    weight: Weight,
    bias: Tensor,
    bias_vl: Tensor | None,
    image_mask: Tensor | None,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    logits = weight.multiply(x).to(torch.float32).to(torch.float64)
    softplus = torch.clamp(logits, min=0) + torch.log1p(torch.exp(-logits.abs()))
    scores = torch.sqrt(softplus).to(torch.float32)
    if bias_vl is not None and image_mask is not None:
        bias = torch.where(image_mask[:, None], bias_vl, bias)
    ranked = (scores + bias).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    ids = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :topk]
    chosen = scores.gather(1, ids).to(torch.float64)
    if topk == 1:  # nothing to weigh against: the score itself
        return (chosen * scale).to(torch.float32), ids
    total = chosen[:, 0].clone()
    for j in range(1, topk):
        total += chosen[:, j]
    return (chosen / (total[:, None] + 1e-20) * scale).to(torch.float32), ids


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Tensor:
    dtype = gate.dtype
    gate, up = gate.to(torch.float64), up.to(torch.float64)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out = gate * sigmoid(gate) * up
    if weight is not None:
        out = out * weight.to(torch.float64)[:, None]
    return out.to(dtype)


Expert = tuple[Tensor, Tensor, Tensor, Tensor]  # w13, s13, w2, s2


@dataclass
class Experts:
    read: Callable[[int], Expert]  # of a slot
    w13: list[Weight]  # per expert [2I, H]: gate rows, then up rows
    w2: list[Weight]  # per expert [H, I]


def prepare_experts(w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> Experts:
    slots, hidden, half = w2.shape
    return experts_of(lambda slot: (w13[slot], s13[slot], w2[slot], s2[slot]), slots, hidden, 2 * half)


def experts_of(read: Callable[[int], Expert], slots: int, hidden: int, inner: int) -> Experts:
    """Experts wherever they lie: ``read`` is asked for one when it is multiplied with. So another provider may leave
    float32 activations, a profile for debugging, to the reference without a copy of every weight."""

    def weight(slot: int, first: int, rows: int, columns: int) -> Weight:
        def load(part: slice) -> Tensor:
            packed, scale = read(slot)[first : first + 2]
            return formats.mxfp4_dequant(packed[part], scale[part])

        return Weight(rows, columns, load)

    return Experts(
        read,
        [weight(slot, 0, 2 * inner, hidden) for slot in range(slots)],
        [weight(slot, 2, hidden, inner) for slot in range(slots)],
    )


def replace_expert(experts: Experts, slot: int, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> None:
    for stored, new in zip(experts.read(slot), (w13, s13, w2, s2), strict=True):
        stored.copy_(new)
    for weight in (experts.w13[slot], experts.w2[slot]):
        weight.refresh()


def read_expert(experts: Experts, slot: int) -> Expert:
    return experts.read(slot)


def moe_experts(x: Tensor, weights: Tensor, ids: Tensor, experts: Experts, limit: float) -> Tensor:
    tokens, topk = ids.shape
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    present, counts = torch.unique_consecutive(flat[order], return_counts=True)
    # (expert, first pair, last pair + 1); pairs with id -1 sort first and stay zero.
    ends = counts.cumsum(0).tolist()
    runs = [
        (expert, end - count, end)
        for expert, count, end in zip(present.tolist(), counts.tolist(), ends, strict=True)
        if expert >= 0
    ]
    rows = order // topk
    left = activation(x)
    inner = experts.w13[0].rows
    hidden = x.new_zeros(order.shape[0], inner)
    for expert, start, end in runs:
        hidden[start:end] = experts.w13[expert].multiply(left[rows[start:end]])
    hidden = swiglu(hidden[:, : inner // 2], hidden[:, inner // 2 :], limit, weights.flatten()[order])
    left = activation(hidden)
    down = x.new_zeros(order.shape[0], experts.w2[0].rows)
    for expert, start, end in runs:
        down[start:end] = experts.w2[expert].multiply(left[start:end])
    # Back to [token, choice], each token's choices in ascending expert id, then added in float32 one by one.
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    by_expert = place.view(tokens, topk).sort(-1).values
    total = down[by_expert[:, 0]].to(torch.float32)
    for j in range(1, topk):
        total += down[by_expert[:, j]].to(torch.float32)
    return total
