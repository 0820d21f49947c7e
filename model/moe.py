"""Mixture of experts: sqrt-softplus gate with a selection bias, MXFP4 routed experts, one FP8 shared expert."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from deepinfer_plugin.kernels import Ops

from .config import QUANT_BLOCK, V41Config
from .expert_map import ExpertMap
from .layers import SCALE, Dense, FP8Weight, JoinedLinear, Linear, parameter
from .parallel import Parallel
from .step import Step


class Gate(Dense):
    """Router weights with two selection biases, text and image; the biases choose experts but never weigh them."""

    def __init__(self, ops: Ops, config: V41Config, experts: int, topk: int):
        super().__init__(ops, config.hidden_size, experts)
        self.topk, self.routed_scale = topk, config.routed_scale
        self.bias = parameter(experts, dtype=torch.float32)
        self.bias_vl = parameter(experts, dtype=torch.float32)

    def route(self, x: Tensor, image_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights float32 [T, topk] and expert ids int64 [T, topk]."""
        return self.ops.moe_gate(x, self.prepared, self.bias, self.bias_vl, image_mask, self.topk, self.routed_scale)


class Experts(nn.Module):
    """The slots of a layer's routed experts that this rank holds, stacked: w1 and w3 as one [2I, H] matrix, two e2m1
    values a byte, a UE8M0 scale per 32. ``layer``: its number in the map; ``loaded``: the experts in the slots when the
    checkpoint is read."""

    raw: tuple[str, ...] = ("w13", "s13", "w2", "s2")

    def __init__(self, ops: Ops, config: V41Config, places: ExpertMap, layer: int, rank: int):
        super().__init__()
        self.ops, self.limit, self.inner = ops, config.swiglu_limit, config.expert_dim
        self.map, self.layer, self.rank, self.slots = places, layer, rank, places.slots
        self.loaded: list[int] = places.placement[layer].reshape(places.ranks, -1)[rank].tolist()
        slots, hidden = self.slots, config.hidden_size
        self.w13 = parameter(slots, 2 * self.inner, hidden // 2, dtype=torch.uint8)
        self.s13 = parameter(slots, 2 * self.inner, hidden // QUANT_BLOCK, dtype=SCALE)
        self.w2 = parameter(slots, hidden, self.inner // 2, dtype=torch.uint8)
        self.s2 = parameter(slots, hidden, self.inner // QUANT_BLOCK, dtype=SCALE)
        self.parts = [(part.shape[1:], part.dtype) for part in (self.w13, self.s13, self.w2, self.s2)]  # of an expert
        self.prepared: Any = None

    def prepare(self) -> None:
        self.prepared = self.ops.prepare_experts(self.w13, self.s13, self.w2, self.s2)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Weighted sum over each token's experts, float32 [T, H]; ids are slots, counted from this rank's first."""
        return self.ops.moe_experts(x, weights, ids, self.prepared, self.limit)

    def assign(self, ids: Tensor) -> Tensor:
        """Slots int64 [T, k], counted over all ranks, that compute expert ids [T, k] of all rows."""
        return self.map.assign(self.ops, self.layer, ids)

    def local(self, slots: Tensor) -> Tensor:
        """``ids`` of ``forward``, from slots counted over all ranks."""
        return self.map.local[self.rank, slots]

    # ---- experts that move -------------------------------------------------------------------------------------------

    @property
    def expert_bytes(self) -> int:
        """What travels when an expert does: as it is laid out where the provider can, which all ranks share, else as in
        a checkpoint."""
        return sum(self._sizes)

    def read(self, slot: int, out: Tensor) -> None:
        """The expert in ``slot`` as bytes, uint8 [expert_bytes]."""
        parts = self._views(slot) or self.ops.read_expert(self.prepared, slot)
        for part, piece in zip(parts, out.split(self._sizes), strict=True):
            piece.copy_(part.view(torch.uint8).flatten())

    def write(self, slot: int, arrived: Tensor) -> None:
        """Another expert into ``slot``, from what ``read`` made of it on another rank."""
        pieces = arrived.split(self._sizes)
        if views := self._views(slot):
            for view, piece in zip(views, pieces, strict=True):
                view.view(torch.uint8).flatten().copy_(piece)
            return
        w13, s13, w2, s2 = (
            piece.view(dtype).view(shape) for (shape, dtype), piece in zip(self.parts, pieces, strict=True)
        )
        self.ops.replace_expert(self.prepared, slot, w13, s13, w2, s2)

    def _views(self, slot: int) -> tuple[Tensor, ...] | None:
        return None if self.prepared is None else self.ops.expert_views(self.prepared, slot)

    @property
    def _sizes(self) -> list[int]:
        if views := self._views(0):
            return [view.nbytes for view in views]
        return [prod(shape) * dtype.itemsize for shape, dtype in self.parts]

    # ---- the checkpoint ----------------------------------------------------------------------------------------------

    def slices(self) -> dict[str, Tensor]:
        """Checkpoint name (below ``experts.``) -> the view of our stacked parameter it fills."""
        views: dict[str, Tensor] = {}
        for index, expert in enumerate(self.loaded):
            for name, rows in (("w1", slice(0, self.inner)), ("w3", slice(self.inner, None))):
                views[f"{expert}.{name}.weight"] = self.w13[index, rows].view(torch.int8)
                views[f"{expert}.{name}.scale"] = self.s13[index, rows]
            views[f"{expert}.w2.weight"] = self.w2[index].view(torch.int8)
            views[f"{expert}.w2.scale"] = self.s2[index]
        return views


class SharedExpert(nn.Module):
    """The expert every token goes through."""

    def __init__(self, ops: Ops, config: V41Config):
        super().__init__()
        self.ops, self.limit = ops, config.swiglu_limit
        self.w1 = FP8Weight(config.hidden_size, config.expert_dim)
        self.w3 = FP8Weight(config.hidden_size, config.expert_dim)
        self.gate_up = JoinedLinear(ops, self.w1, self.w3)
        self.w2 = Linear(ops, config.expert_dim, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        return self.w2(self.ops.swiglu(gate, up, self.limit, None))


class MoE(nn.Module):
    """On many ranks each finishes the rows that it owns: the routed experts' outputs come to it, the shared expert,
    which every rank holds, runs there."""

    def __init__(self, ops: Ops, config: V41Config, places: ExpertMap, layer: int, topk: int, parallel: Parallel):
        super().__init__()
        self.gate = Gate(ops, config, places.experts, topk)
        self.experts = Experts(ops, config, places, layer, parallel.place.experts.index)
        self.shared_experts = SharedExpert(ops, config)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        exchange = step.exchange
        routed = exchange.routed(self.experts, x, *self.gate.route(x, step.rows.image_mask))
        return exchange.whole((routed + self.shared_experts(exchange.own(x)).float()).to(x.dtype))
