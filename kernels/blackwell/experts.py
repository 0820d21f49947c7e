"""The routed experts: two grouped products FP8/32 x MXFP4 (``deep_gemm``), SwiGLU and the cast between them.

Rows are copied expert by expert, each expert's first row at a multiple of the library's alignment. How many tokens an
expert has is known on the device only, so there is room for any division of the pairs, and the ends of the experts'
rows, which the products read, say what of it is used: the padding between experts is not computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..cuda.gate import swiglu
from . import libraries
from .casts import cast_fp8, pack_scales, unpack_scales
from .linear import RECIPE


@dataclass(frozen=True)
class Experts:
    """Operands of the two products: packed e2m1 int8 [E, N, K/2] and packed scales int32 [E, N, ceil(K/128)]."""

    gate_up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]


def prepare_experts(w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> Experts:
    def operand(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return packed.contiguous().view(torch.int8), pack_scales(scale, packed.shape[1])

    return Experts(operand(w13, s13), operand(w2, s2))


def replace_expert(experts: Experts, slot: int, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> None:
    for (values, scales), packed, scale in ((experts.gate_up, w13, s13), (experts.down, w2, s2)):
        values[slot].copy_(packed.view(torch.int8))
        scales[slot].copy_(pack_scales(scale, packed.shape[0]))


def read_expert(experts: Experts, slot: int) -> reference.moe.Expert:
    def given(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        return values[slot].view(torch.uint8), unpack_scales(scales[slot], 2 * values.shape[2])

    return *given(*experts.gate_up), *given(*experts.down)


@dataclass(frozen=True)
class Route:
    """``source`` int64 [M]: the (token, choice) pair of each row, -1 for padding. ``ends`` int32 [E]: one past the last
    row of each expert. ``place`` int64 [T * k]: the row of each pair, M for none."""

    source: Tensor
    ends: Tensor
    place: Tensor

    @classmethod
    def of(cls, ids: Tensor, experts: int, alignment: int) -> Route:
        """ids int64 [T, k], -1: none. Nothing here waits for the device."""
        flat, device = ids.flatten(), ids.device
        pairs = flat.shape[0]
        # Each expert that is used wastes less than one alignment.
        rows = -(-(pairs + min(experts, pairs) * (alignment - 1)) // alignment) * alignment
        key = torch.where(flat < 0, experts, flat)
        counts = torch.zeros(experts + 1, dtype=torch.int64, device=device)
        counts.scatter_add_(0, key, torch.ones_like(key))
        padded = (counts + alignment - 1) // alignment * alignment
        starts, before = padded.cumsum(0) - padded, counts.cumsum(0) - counts
        order = key.argsort(stable=True)
        sorted_key = key[order]
        row = starts[sorted_key] + torch.arange(pairs, device=device) - before[sorted_key]
        row = torch.where(sorted_key == experts, rows, row)
        place = torch.empty_like(row).scatter_(0, order, row)
        source = torch.full((rows + 1,), -1, dtype=torch.int64, device=device).scatter_(0, row, order)
        return cls(source[:rows], (starts + counts)[:experts].to(torch.int32), place)


def moe_experts(x: Tensor, weights: Tensor, ids: Tensor, experts: Experts, limit: float) -> Tensor:
    if x.dtype == torch.float32:
        slots, width, half = experts.down[0].shape
        wide = reference.moe.experts_of(partial(read_expert, experts), slots, width, 2 * half)
        return reference.moe.moe_experts(x, weights, ids, wide, limit)
    tokens, choices = ids.shape
    if not ids.numel():
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    library = libraries.deep_gemm()
    route = Route.of(ids, experts.gate_up[0].shape[0], library.get_mk_alignment_for_contiguous_layout())
    token = torch.where(route.source < 0, -1, route.source // choices)
    hidden = _product(library, cast_fp8(x, token), experts.gate_up, route)
    gate, up = hidden.chunk(2, 1)
    weight = torch.where(route.source < 0, 0.0, weights.flatten()[route.source.clamp(min=0)])
    outputs = _product(library, cast_fp8(swiglu(gate, up, limit, weight)), experts.down, route)
    # A token's choices in ascending order of expert; those of other ranks come first and add nothing.
    by_expert = route.place.view(tokens, choices).gather(1, ids.argsort(-1))
    total = torch.zeros(tokens, outputs.shape[1], dtype=torch.float32, device=x.device)
    for place in by_expert.unbind(1):
        there = place < outputs.shape[0]
        total += torch.where(there[:, None], outputs[torch.where(there, place, 0)].to(torch.float32), 0.0)
    return total


def _product(library: Any, rows: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], route: Route) -> Tensor:
    """bf16 [M, N]; what rows of padding hold is not defined."""
    out = torch.empty(rows[0].shape[0], weight[0].shape[1], dtype=torch.bfloat16, device=rows[0].device)
    library.m_grouped_fp8_fp4_gemm_nt_contiguous(
        rows, weight, out, route.ends, recipe_a=RECIPE, recipe_b=RECIPE, use_psum_layout=True
    )
    return out
