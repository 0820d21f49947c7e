"""Differentiable indexer and attention over whole sequences: dense logits, with masks where the served ops gather."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from round_trips import fused_any_shape
from torch import Tensor
from training_memory import Box


@dataclass
class Selection:
    """``mask`` bool [sequences, T, G]: groups that each row may read. ``scores`` [sequences, T, G]: what the indexer
    said, until its loss has been taken.
    """

    mask: Tensor
    scores: Tensor | None


class AttentionOps:
    sequences: int
    draft_block: int
    dense_groups: bool
    losses: list[Tensor]
    formats: object

    # ---- selection ---------------------------------------------------------------------------------------------------

    def index_scores(
        self,
        query: Tensor,
        weight: Tensor,
        key: Box,
        key_scale: Box,
        page_table: Tensor,
        requests: Tensor,
        visible: Tensor,
        low_precision: bool,
    ) -> Tensor:
        """[sequences, T, G], -inf where a group is not visible."""
        assert key.value is not None
        query = self.formats.index(query).unflatten(0, (self.sequences, -1))  # type: ignore[attr-defined]
        weight = weight.unflatten(0, (self.sequences, -1))
        dots = torch.einsum("bthd,bgd->bhtg", query, key.value)
        scores = _score(dots, weight.transpose(1, 2).unsqueeze(-1))
        return scores.masked_fill(~_reachable(visible, scores), -torch.inf)

    def candidate_blocks(self, scores: Tensor, visible: Tensor, block_size: int, blocks: int) -> Tensor:
        """bool [sequences, T, G]."""
        groups = scores.shape[-1]
        count = -(-groups // block_size)
        best = F.pad(scores.detach(), (0, count * block_size - groups), value=-torch.inf)
        best = best.unflatten(-1, (count, block_size)).amax(-1)
        last = (visible.view(*scores.shape[:2], 1) - 1) // block_size
        best = best.masked_fill(torch.arange(count, device=best.device) == last, torch.inf)
        chosen = torch.zeros_like(best, dtype=torch.bool)
        chosen.scatter_(-1, best.topk(min(blocks, count)).indices, True)
        return chosen.repeat_interleave(block_size, -1)[..., :groups]

    def top_groups(self, scores: Tensor, visible: Tensor, k: int, candidates: Tensor | None) -> Selection:
        reachable = _reachable(visible, scores)
        if self.dense_groups or k >= scores.shape[-1]:
            return Selection(reachable, scores)
        # A candidate layer keeps more groups than the selection takes: the others matter only while few are visible.
        key = scores.detach()
        if candidates is not None:
            key = torch.where(candidates | ~reachable, key, key - 1e4)
        mask = torch.zeros_like(reachable).scatter_(-1, key.topk(k).indices, True)
        return Selection(mask & reachable, scores)

    # ---- attention ---------------------------------------------------------------------------------------------------

    def sparse_attention(
        self,
        q: Tensor,
        window: Tensor,
        positions: Tensor,
        fresh: Tensor,
        row_slots: Tensor,
        window_floor: Tensor,
        ring: Box,
        window_len: int,
        latent: Box | None,
        latent_scale: Box | None,
        page_table: Tensor | None,
        requests: Tensor | None,
        selected: Selection | None,
        sink: Tensor,
        scale: float,
        block_future: Tensor | None,
    ) -> Tensor:
        if block_future is not None:
            block = self.draft_block
            return _draft_attention(q, window, positions, row_slots, window_floor, ring, window_len, sink, scale, block)
        # Queries in runs of one window; a run reads its own window keys and those of the run before.
        keys = window.unflatten(0, (self.sequences, -1))
        length = keys.shape[1]
        run = min(window_len, length)
        assert length % run == 0, f"a sequence must be a multiple of the window, got {length}"
        q = q.unflatten(0, (self.sequences, -1, run)).transpose(2, 3)  # [B, runs, heads, run, D]
        before = F.pad(keys, (0, 0, run, 0))[:, :length].unflatten(1, (-1, run))
        near = torch.cat((before, keys.unflatten(1, (-1, run))), 2)  # [B, runs, 2 * run, D]
        logits = q.float().flatten(2, 3) @ near.float().mT
        logits = logits.unflatten(2, q.shape[2:4])  # [B, runs, heads, run, 2 * run]
        mask = _window_mask(length // run, run, window_len, q.device)
        if selected is None or latent is None or latent.value is None:
            p = _softmax(logits, mask, sink, scale, q.dtype)
            o = p @ near.unsqueeze(2)
        else:
            far = latent.value
            groups = (q.float().flatten(1, 3) @ far.float().mT).view(*q.shape[:4], -1)  # [B, runs, heads, run, G]
            chosen = selected.mask.unflatten(1, (-1, run)).unsqueeze(2)
            if selected.scores is not None and torch.is_grad_enabled():
                scores = selected.scores.unflatten(1, (-1, run))
                self.losses.append(_index_loss(logits.detach(), mask, groups.detach(), scores, sink.detach(), scale))
            selected.scores = None
            p, r = _split_softmax(logits, groups, mask, chosen, sink, scale, q.dtype)
            o = p @ near.unsqueeze(2) + (r.flatten(1, 3) @ far).view_as(q)
        return o.transpose(2, 3).flatten(0, 2)


def _draft_attention(
    q: Tensor,
    window: Tensor,
    positions: Tensor,
    row_slots: Tensor,
    window_floor: Tensor,
    ring: Box,
    window_len: int,
    sink: Tensor,
    scale: float,
    block: int,
) -> Tensor:
    """Rows of a draft block read the context before the block, kept in the ring [sequences, T, D], and each other."""
    assert ring.value is not None
    first, floor, slots = positions[::block], window_floor[::block], row_slots[::block]
    at = first[:, None] - window_len + torch.arange(window_len, device=q.device)
    context = ring.value[slots[:, None], at.clamp(min=0)]
    keys = torch.cat((context, window.unflatten(0, (-1, block))), 1)  # [blocks, window + block, D]
    mask = F.pad(at >= floor[:, None], (0, block), value=True)[:, None, None]
    q = q.unflatten(0, (-1, block)).transpose(1, 2)  # [blocks, heads, block, D]
    logits = (q.float().flatten(1, 2) @ keys.float().mT).unflatten(1, q.shape[1:3])
    o = (_softmax(logits, mask, sink, scale, q.dtype).flatten(1, 2) @ keys).view_as(q)
    return o.transpose(1, 2).flatten(0, 1)


@functools.cache
def _window_mask(runs: int, run: int, window: int, device: torch.device) -> Tensor:
    """bool [1, runs, 1, run, 2 * run]: which keys of its own run and the run before a query sees."""
    query, key = torch.arange(run, device=device)[:, None] + run, torch.arange(2 * run, device=device)
    seen = (key <= query) & (query - key < window)
    exists = (torch.arange(runs, device=device)[:, None] > 0) | (key >= run)
    return (seen & exists[:, None])[None, :, None]


def _reachable(visible: Tensor, scores: Tensor) -> Tensor:
    """bool [sequences, T, G]."""
    return torch.arange(scores.shape[-1], device=scores.device) < visible.view(*scores.shape[:2], 1)


# ---- bodies that one kernel each computes ----------------------------------------------------------------------------


def _score(dots: Tensor, weight: Tensor) -> Tensor:
    """bf16 dots [B, heads, T, G], weight [B, heads, T, 1] -> bf16 [B, T, G]; each product rounded, as the model profile
    does.
    """
    return (F.relu(dots) * weight).float().sum(1).to(dots.dtype)


@fused_any_shape
def _softmax(logits: Tensor, mask: Tensor, sink: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Probabilities [..., heads, rows, keys] rounded to ``dtype``; the sink takes its share of the sum and gives
    nothing.
    """
    logits = (logits * scale).masked_fill(~mask, -torch.inf)
    top = logits.amax(-1, keepdim=True).clamp(min=-1e30)
    p = torch.exp(logits - top)
    total = p.sum(-1, keepdim=True) + torch.exp(sink[:, None, None] - top)
    return (p / total).to(dtype)


@fused_any_shape
def _split_softmax(
    near: Tensor, far: Tensor, near_mask: Tensor, far_mask: Tensor, sink: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``_softmax`` over two runs of keys."""
    near = (near * scale).masked_fill(~near_mask, -torch.inf)
    far = (far * scale).masked_fill(~far_mask, -torch.inf)
    top = torch.maximum(near.amax(-1, keepdim=True), far.amax(-1, keepdim=True)).clamp(min=-1e30)
    p, r = torch.exp(near - top), torch.exp(far - top)
    total = p.sum(-1, keepdim=True) + r.sum(-1, keepdim=True) + torch.exp(sink[:, None, None] - top)
    return (p / total).to(dtype), (r / total).to(dtype)


@fused_any_shape
def _index_loss(near: Tensor, mask: Tensor, far: Tensor, scores: Tensor, sink: Tensor, scale: float) -> Tensor:
    """KL from what the heads together give each visible group to the softmax of the groups' scores [B, runs, run, G],
    mean over the rows that see a group. ``near`` and ``far``: logits of window and groups, without gradient.
    """
    reachable = scores > -torch.inf
    near = (near * scale).masked_fill(~mask, -torch.inf)
    far = (far * scale).masked_fill(~reachable.unsqueeze(2), -torch.inf)
    top = torch.maximum(near.amax(-1, keepdim=True), far.amax(-1, keepdim=True))
    far = torch.exp(far - top)
    total = (
        torch.exp(near - top).sum(-1, keepdim=True) + far.sum(-1, keepdim=True) + torch.exp(sink[:, None, None] - top)
    )
    mass = (far / total).sum(2)
    mass = mass / mass.sum(-1, keepdim=True).clamp(min=1e-20)
    logp = torch.log_softmax(scores.float().masked_fill(~reachable, -1e30), -1)
    kl = (torch.xlogy(mass, mass) - mass * logp).sum(-1)
    some = reachable[..., 0]
    return (kl * some).sum() / some.sum().clamp(min=1)
