"""The gate of the mixture of experts, and SwiGLU.

moe_gate: the router is one more product of few outputs, split over K (``linear``); a second launch, a row a program of
one warp, adds the parts, scores them and picks. A pick is one maximum over 64-bit keys: the score's bits, ordered like
its value, above the complement of the expert's id, so the lower id wins a tie and a NaN comes last.

swiglu: 1024 channels of a row a program, 16 bytes a thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .linear import Weight, partial_products
from .norm_rope import to_narrow, to_wide
from .overlap import OVERLAP, after_previous


@triton.jit
def _score(logit):
    """sqrt(softplus(logit)), relative error of a few float32 steps wherever the logit lies."""
    e = tl.exp(-tl.abs(logit))
    # log(1 + e) = 2 atanh(e / (2 + e)), whose argument is at most 1/3.
    s = e / (2.0 + e)
    z = s * s
    series = z * (1 / 17) + 1 / 15
    series = series * z + 1 / 13
    series = series * z + 1 / 11
    series = series * z + 1 / 9
    series = series * z + 1 / 7
    series = series * z + 1 / 5
    series = series * z + 1 / 3
    series = series * z + 1.0
    softplus = tl.where(logit > 0, logit, 0.0) + 2.0 * s * series
    return tl.sqrt(softplus)


@triton.jit(do_not_specialize=["rows"])
def _choose(
    parts,
    bias,
    bias_vl,
    image_mask,
    weights,
    ids,
    rows,
    scale,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_BLOCK)
    there = expert < EXPERTS
    logit = tl.zeros((EXPERTS_BLOCK,), parts.dtype.element_ty)
    for _ in tl.static_range(PARTS):
        logit += tl.load(parts + row * EXPERTS + expert, mask=there, other=0.0)
        parts += rows * EXPERTS
    score = _score(logit.to(tl.float32).to(parts.dtype.element_ty)).to(tl.float32)
    shift = tl.load(bias + expert, mask=there, other=0.0)
    if bias_vl is not None and image_mask is not None:
        of_image = tl.load(image_mask + row) != 0
        shift = tl.where(of_image, tl.load(bias_vl + expert, mask=there, other=0.0), shift)
    rank = score + shift
    rank = tl.where(rank != rank, float("-inf"), rank)
    # A score is positive, so there is no -0.0 here: two's complement then orders the bits like the values.
    bits = rank.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - expert).to(tl.int64)
    lowest = tl.full((EXPERTS_BLOCK,), -(2**63), tl.int64)
    key = tl.where(there, key, lowest)

    pick = tl.arange(0, TOPK_BLOCK)
    chosen = tl.zeros((TOPK_BLOCK,), tl.int64)
    weight = tl.zeros((TOPK_BLOCK,), tl.float32)
    for j in tl.static_range(TOPK):
        best = 0x7FFFFFFF - (tl.max(key, axis=0) & 0xFFFFFFFF)
        key = tl.where(expert == best, lowest, key)
        chosen = tl.where(pick == j, best, chosen)
        weight = tl.where(pick == j, tl.sum(tl.where(expert == best, score, 0.0), axis=0), weight)
    factor = weight.to(tl.float64)
    if TOPK > 1:
        factor = factor / (tl.sum(factor, axis=0) + 1e-20)
    out = row * TOPK + pick
    tl.store(weights + out, (factor * scale).to(tl.float32), mask=pick < TOPK)
    tl.store(ids + out, chosen, mask=pick < TOPK)


def moe_gate(
    x: Tensor,
    weight: Weight,
    bias: Tensor,
    bias_vl: Tensor | None,
    image_mask: Tensor | None,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    rows, experts = x.shape[0], weight.outputs
    weights = torch.empty(rows, topk, dtype=torch.float32, device=x.device)
    ids = torch.empty(rows, topk, dtype=torch.int64, device=x.device)
    if rows:
        parts = partial_products(x, weight)
        _choose[(rows,)](
            parts,
            bias.contiguous(),
            None if bias_vl is None else bias_vl.contiguous(),
            None if image_mask is None else image_mask.contiguous(),
            weights,
            ids,
            rows,
            scale,
            parts.shape[0],
            experts,
            topk,
            triton.next_power_of_2(experts),
            triton.next_power_of_2(topk),
            num_warps=1 if experts <= 512 else 4,
            **OVERLAP,
        )
    return weights, ids


@triton.jit
def _swiglu(
    gate,
    up,
    weight,
    out,
    gate_stride,
    up_stride,
    INNER: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < INNER
    g = to_wide(tl.load(gate + row * gate_stride + channel, mask=there, other=0.0))
    u = to_wide(tl.load(up + row * up_stride + channel, mask=there, other=0.0))
    if LIMIT > 0:  # comparisons, not minimum and maximum: a NaN stays
        g = tl.where(g > LIMIT, LIMIT, g)
        u = tl.where(u > LIMIT, LIMIT, u)
        u = tl.where(u < -LIMIT, -LIMIT, u)
    result = g * (1.0 / (1.0 + tl.exp(-g))) * u
    if weight is not None:
        result = result * tl.load(weight + row).to(g.dtype)
    tl.store(out + row * INNER + channel, to_narrow(result, out.dtype.element_ty), mask=there)


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Tensor:
    rows, inner = gate.shape
    out = torch.empty(rows, inner, dtype=gate.dtype, device=gate.device)
    if out.numel():
        gate, up = (each if each.stride(1) == 1 else each.contiguous() for each in (gate, up))
        weight = None if weight is None else weight.contiguous()
        block = min(1024, triton.next_power_of_2(inner))
        grid = (rows, triton.cdiv(inner, block))
        _swiglu[grid](gate, up, weight, out, gate.stride(0), up.stride(0), inner, limit, block, **OVERLAP)
    return out
