"""The op table of the network, made differentiable: what is trained is what is served.

``TrainingOps`` has the methods of ``kernels.Ops``, so that ``model/`` runs on it unchanged. Values go through the
formats of ``kernels/reference/formats.py`` and the rounding points of the ``model`` profile; gradients go straight
through every cast. A batch is ``sequences`` whole sequences of one length, starting at position 0: nothing is cached,
and where the served ops read packed bytes from pages and rings, these read the float tensors that ``training_memory``
carries in their place.

Products of bf16, FP8 and FP4 values are exact in TF32 and bf16 units, so only the order of sums differs from the
reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from round_trips import constant, fp8, fp8_tiles, fused, latent, mxfp4
from torch import Tensor
from training_attention import AttentionOps
from training_memory import Box

from deepinfer_plugin.kernels.contracts.streams import compose_site
from deepinfer_plugin.kernels.reference.engram import engram_hash
from deepinfer_plugin.kernels.reference.formats import E2M1_MAX, E4M3_MAX

Cast = Callable[[Tensor, Tensor], Tensor]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cast: Cast, largest: float, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        ctx.dtype = x.dtype
        return cast(x, constant(largest, x.device)).to(dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return grad.to(ctx.dtype), None, None, None


def straight_through(x: Tensor, cast: Cast, largest: float, dtype: torch.dtype) -> Tensor:
    """The round trip of x through a format whose largest value is ``largest``, in ``dtype``, with the gradient of x."""
    return _StraightThrough.apply(x, cast, largest, dtype)


class ServedFormats:
    """What is left of a tensor after the format in which it is stored, multiplied, cached or compared."""

    def weight(self, w: Tensor) -> Tensor:
        return straight_through(w, fp8_tiles, E4M3_MAX, torch.bfloat16)

    def expert(self, w: Tensor) -> Tensor:
        return straight_through(w, mxfp4, E2M1_MAX, torch.bfloat16)

    def activation(self, x: Tensor) -> Tensor:
        return straight_through(x, fp8, E4M3_MAX, x.dtype)

    window = engram = activation

    def latent(self, x: Tensor) -> Tensor:
        return straight_through(x, latent, E2M1_MAX, x.dtype)

    def index(self, x: Tensor) -> Tensor:
        return straight_through(x, mxfp4, E2M1_MAX, x.dtype)


class Unquantised:
    """bf16 everywhere: what the formats are measured against."""

    def weight(self, w: Tensor) -> Tensor:
        return w.bfloat16()

    def activation(self, x: Tensor) -> Tensor:
        return x

    expert = weight
    window = engram = latent = index = activation


class TrainingOps(AttentionOps):
    """
    sequences: rows of a batch are this many sequences of equal length.
    draft_block: rows of a draft block.
    formats: ``ServedFormats`` or ``Unquantised``.
    dense_groups: attend to every visible group while the indexer learns, instead of to the selected ones.
    losses, loads: collected during a forward: the indexers' losses, and how often each gate chose each expert.
    """

    def __init__(self, formats: ServedFormats | Unquantised | None = None):
        self.formats = formats or ServedFormats()
        self.sequences = 1
        self.draft_block = 0
        self.dense_groups = False
        self.losses: list[Tensor] = []
        self.loads: list[tuple[Tensor, Tensor]] = []  # (the gate's bias, choices of each expert)

    # ---- weights: masters in, what the checkpoint will hold out ------------------------------------------------------

    def prepare_linear(self, weight: Tensor, scale: Tensor | None) -> Tensor:
        return self.formats.weight(weight)

    def prepare_grouped(self, weight: Tensor, scale: Tensor | None, groups: int) -> Tensor:
        return self.prepare_linear(weight, scale).unflatten(0, (groups, -1))

    def prepare_dense(self, weight: Tensor) -> Tensor:
        return weight.bfloat16()

    def prepare_experts(self, w13: Tensor, s13: Tensor | None, w2: Tensor, s2: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.formats.expert(w13), self.formats.expert(w2)

    # ---- matrix products ---------------------------------------------------------------------------------------------

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(self.formats.activation(x), weight.to(x.dtype))

    def dense(self, x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return F.linear(x.to(dtype := out_dtype or x.dtype), weight.to(dtype))

    def grouped_linear(self, o: Tensor, weight: Tensor, fp8: bool) -> Tensor:
        assert not fp8, "training follows the model profile"
        return torch.einsum("tgk,gnk->tgn", o, weight.to(o.dtype)).flatten(1)

    # ---- streams -----------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms_norm(x, weight, eps)

    def rope(self, x: Tensor, positions: Tensor, inv_freq: Tensor, inverse: bool = False) -> Tensor:
        return _rotate(x, positions, inv_freq, -1.0 if inverse else 1.0)

    def hc_mix(
        self, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iters: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        flat = streams.flatten(1).float()
        rms = torch.sqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
        return _mixes(F.linear(flat, fn) / rms, base, scale, hc_eps, iters, streams.shape[1])

    def hc_collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        return _collapse(streams, pre)

    def hc_expand(self, out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return _expand(out, streams, post, comb)

    def hc_site(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return compose_site(self, *arguments)

    # ---- memory: float tensors instead of bytes ----------------------------------------------------------------------

    def window_pack(self, kv: Tensor) -> Tensor:
        return self.formats.window(kv)

    def window_write(
        self, packed: Tensor, row_slots: Tensor, positions: Tensor, keep: Tensor, ring: Box, tags: Box
    ) -> None:
        ring.value = packed.unflatten(0, (self.sequences, -1))

    def compress_pair(
        self,
        value: Tensor,
        score: Tensor,
        positions: Tensor,
        fresh: Tensor,
        row_slots: Tensor,
        tail: Box,
        dtype: torch.dtype,
    ) -> Tensor:
        weight = torch.softmax(score.unflatten(0, (-1, 2)), 1)
        pooled = (value.unflatten(0, (-1, 2)) * weight).sum(1)
        return pooled.repeat_interleave(2, 0).to(dtype)  # the first row of a pair is never read

    def tail_write(self, *_: object) -> None:
        pass

    ngram_write = tail_write

    def latent_write(
        self, latent: Tensor, values: Box, scales: Box, page_ids: Tensor, groups: Tensor, keep: Tensor
    ) -> None:
        values.value = self._groups(self.formats.latent(latent), values.ratio)

    def index_key_write(
        self, key: Tensor, values: Box, scales: Box, page_ids: Tensor, groups: Tensor, keep: Tensor
    ) -> None:
        values.value = self._groups(self.formats.index(key), values.ratio)

    def _groups(self, rows: Tensor, ratio: int) -> Tensor:
        """[R, D] -> [sequences, groups, D]: the row that completes each group."""
        return rows.unflatten(0, (self.sequences, -1, ratio))[:, :, ratio - 1]

    # ---- experts -----------------------------------------------------------------------------------------------------

    def moe_gate(
        self, x: Tensor, weight: Tensor, bias: Tensor, bias_vl: Tensor, image_mask: None, topk: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        scores = torch.sqrt(F.softplus(F.linear(x.float(), weight.float())))
        ids = torch.topk(scores.detach() + bias, topk).indices
        self.loads.append((bias, _counts(ids, len(bias))))
        chosen = scores.gather(1, ids)
        return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale, ids

    def swiglu(self, gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Tensor:
        assert weight is None, "the routed experts have their own"
        return _swiglu(gate, up, limit, constant(1.0, gate.device))

    def moe_experts(
        self, x: Tensor, weights: Tensor, ids: Tensor, experts: tuple[Tensor, Tensor], limit: float
    ) -> Tensor:
        """Every expert sees every token; those that were not chosen weigh nothing. At this size that costs less than
        sorting.
        """
        w13, w2 = experts
        count, inner = w13.shape[0], w2.shape[2]
        share = torch.zeros(len(x), count, device=x.device).scatter(1, ids, weights)
        both = F.linear(self.formats.activation(x), w13.flatten(0, 1).to(x.dtype)).unflatten(-1, (count, 2, inner))
        hidden = self.formats.activation(_swiglu(both[:, :, 0], both[:, :, 1], limit, share[..., None]))
        down = torch.bmm(hidden.transpose(0, 1), w2.to(x.dtype).mT)
        return down.sum(0, dtype=torch.float32)

    # ---- Engram ------------------------------------------------------------------------------------------------------

    engram_hash = staticmethod(engram_hash)

    def engram_gather(self, rows: Tensor, table: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        return self.formats.engram(table.index_select(0, rows.flatten()).view(*rows.shape, -1)).to(dtype).flatten(1)

    def engram_gate(
        self, streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, live: Tensor
    ) -> Tensor:
        return _engram_gate(streams, kv, q_weight, k_weight, eps)

    # ---- draft heads -------------------------------------------------------------------------------------------------

    def markov(self, prev: Tensor, embed: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        e = embed.index_select(0, prev).bfloat16()
        return F.linear(e.float(), head.float()), e

    def confidence(self, hidden: Tensor, e: Tensor, proj: Tensor) -> Tensor:
        return F.linear(torch.cat((hidden, e), -1).float(), proj.bfloat16().float()).squeeze(-1)


def _counts(ids: Tensor, experts: int) -> Tensor:
    return torch.zeros(experts, dtype=torch.int64, device=ids.device).index_add_(
        0, ids.flatten(), torch.ones_like(ids.flatten())
    )


# ---- bodies that one kernel each computes ----------------------------------------------------------------------------


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.bfloat16().float()).to(x.dtype)


def _rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, direction: float) -> Tensor:
    """x [R, ..., D]: the last channels turn, in interleaved pairs."""
    half = inv_freq.shape[0]
    angle = (positions.float()[:, None] * inv_freq).view((x.shape[0],) + (1,) * (x.dim() - 2) + (half,))
    cos, sin = angle.cos(), angle.sin() * direction
    even, odd = x[..., -2 * half :].float().unflatten(-1, (half, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., : -2 * half], turned.to(x.dtype)), -1)


@fused
def _mixes(mix: Tensor, base: Tensor, scale: Tensor, eps: float, iters: int, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """[T, (2+m)m] raw mixes -> pre, post [T, m] and the nearly doubly stochastic comb [T, m, m] (source, target)."""
    pre = torch.sigmoid(mix[:, :m] * scale[0] + base[:m]) + eps
    post = 2 * torch.sigmoid(mix[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    logits = (mix[:, 2 * m :] * scale[2] + base[2 * m :]).unflatten(-1, (m, m))
    comb = torch.softmax(logits, -1) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return pre, post, comb


@fused
def _collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return (streams.float() * pre[..., None]).sum(1).to(streams.dtype)


@fused
def _expand(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    result = post[..., None] * out.float()[:, None]
    for j in range(streams.shape[1]):
        result = result + comb[:, j, :, None] * streams[:, j, None].float()
    return result.to(out.dtype)


@fused
def _swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor) -> Tensor:
    wide_gate, wide_up = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
    return (F.silu(wide_gate) * wide_up * weight).to(gate.dtype)


def _engram_gate(streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    m, size = streams.shape[1:]
    wide, key = streams.float(), kv[:, : m * size].float().unflatten(-1, (m, size))
    weight = q_weight.bfloat16().float() * k_weight.bfloat16().float()
    rms = torch.sqrt((wide.square().mean(-1) + eps) * (key.square().mean(-1) + eps))
    match = (wide * weight * key).sum(-1) / rms * size**-0.5
    gate = torch.sigmoid(torch.copysign(match.abs().clamp(min=1e-6).sqrt(), match))
    return (wide + gate[..., None] * kv[:, m * size :].float()[:, None]).to(streams.dtype)
