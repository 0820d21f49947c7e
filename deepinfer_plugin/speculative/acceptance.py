"""Which drafts of a ragged verify block were right, and the token that follows them.

Exact: whatever was drafted and however many drafts are verified, the emitted tokens are distributed as if the target
had been sampled token by token. Three conditions, the first two the caller's:

* drafts were drawn from the ``draft_probs`` given here (None: they were not drawn at all, but chosen);
* whether draft j is verified does not depend on the draw of draft j or of a later one (``planner`` sees to it);
* target probabilities already contain logit bias and grammar masks: a masked draft has probability 0 and is rejected.

Everything is a tensor operation of fixed shape: no host synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .randomness import ACCEPT, RESIDUAL, TARGET, uniform


@dataclass(frozen=True)
class Verdict:
    """What B requests emit. Draft j of request b was judged by row ``cu_rows[b] + j``, and so was emitted token j."""

    accepted: Tensor  # int64 [B] drafts accepted, 0..K
    tokens: Tensor  # int64 [B, K+1] the accepted drafts, then one token of the target's, then -1

    @property
    def emitted(self) -> Tensor:
        """int64 [B] tokens emitted, 1..K+1."""
        return self.accepted + 1


def distribution(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """What a request samples from: float32 [R, V], each row sums to 1.

    logits: [R, V], bias and masks applied. temperature, top_p, min_p: float [R]; top_k: int [R]; None: no row has
    that filter. temperature > 0.

    The filters look at the same unfiltered probabilities: a token stays if it is among the top_k, if those before
    it sum to at most top_p, and if it has min_p of the best one's probability. Ties: the lower id counts as better.
    """
    probs = torch.softmax(logits.float() / temperature[:, None], dim=-1)
    if top_k is None and top_p is None and min_p is None:
        return probs
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        keep &= torch.arange(logits.shape[-1], device=logits.device) < top_k[:, None]
    if top_p is not None:
        keep &= ordered.cumsum(dim=-1) - ordered <= top_p[:, None]
    if min_p is not None:
        keep &= ordered >= ordered[:, :1] * min_p[:, None]
    ordered = torch.where(keep, ordered, 0)
    return torch.zeros_like(probs).scatter_(-1, ids, ordered / ordered.sum(dim=-1, keepdim=True))


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One token per row by inversion: int64 [B]. weights: [B, V] >= 0, any positive sum; uniforms: float64 [B] in
    (0, 1). A weight of 0 is never drawn. A row of NaN or without weight gives some legal id."""
    cumulative = weights.double().cumsum(dim=-1)
    goal = uniforms * cumulative[:, -1]
    return torch.searchsorted(cumulative, goal[:, None], right=True)[:, 0].clamp_(max=weights.shape[-1] - 1)


def verify(
    probs: Tensor,
    cu_rows: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    chosen: Tensor | None = None,
    by_choice: Tensor | None = None,
) -> Verdict:
    """Rejection sampling of B requests' drafts.

    probs: float [R, V] the target's ``distribution`` after each verify row; rows beyond ``cu_rows[-1]`` are padding.
    cu_rows: int64 [B+1] first row of each request: its anchor, then the drafts that are verified (at most K).
    drafts: int64 [B, K]. draft_probs: float [B, K, V] what each draft was drawn from; None: drafts were chosen, not
    drawn (each was certain). seeds: int64 [B]. positions: int64 [B] position of the first token to emit.
    chosen: int64 [R] and by_choice: bool [B]: for these requests the target's token after a row is known, a
    function of the prefix alone (greedy, or seeded sampling with noise of its own), and a draft is right iff it is
    that token; their ``probs`` are not looked at.
    """
    count, block = drafts.shape
    first, limit = cu_rows[:-1], cu_rows.diff() - 1
    offsets = torch.arange(block, device=drafts.device)
    rows = (first[:, None] + offsets).clamp_(max=probs.shape[0] - 1)  # judge of each draft, where there is one

    likely = probs[rows, drafts].double()
    drawn = 1.0 if draft_probs is None else draft_probs.gather(-1, drafts[..., None])[..., 0].double()
    right = uniform(seeds[:, None], positions[:, None] + offsets, ACCEPT) * drawn < likely
    if chosen is not None and by_choice is not None:
        right = torch.where(by_choice[:, None], drafts == chosen[rows], right)
    accepted = _prefix(right & (offsets < limit[:, None]))

    last = first + accepted
    weights = probs[last]
    rejected = accepted < limit
    at = accepted.clamp(max=block - 1)
    if draft_probs is None:
        wrong = drafts.gather(1, at[:, None])
        residual = weights.scatter(1, wrong, 0)
    else:
        residual = (weights - draft_probs[torch.arange(count, device=drafts.device), at]).clamp_(min=0)
    # A rejection with nothing left over happens only through rounding, where both distributions are the same.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, weights)
    where = positions + accepted
    token = draw(
        torch.where(rejected[:, None], residual, weights),
        torch.where(rejected, uniform(seeds, where, RESIDUAL), uniform(seeds, where, TARGET)),
    )
    if chosen is not None and by_choice is not None:
        token = torch.where(by_choice, chosen[last], token)
    return _verdict(drafts, accepted, token)


def verify_chosen(chosen: Tensor, cu_rows: Tensor, drafts: Tensor) -> Verdict:
    """``verify`` where every request is by choice: no probabilities are needed. chosen: int64 [R]."""
    first, limit = cu_rows[:-1], cu_rows.diff() - 1
    offsets = torch.arange(drafts.shape[1], device=drafts.device)
    rows = (first[:, None] + offsets).clamp_(max=chosen.shape[0] - 1)
    accepted = _prefix((drafts == chosen[rows]) & (offsets < limit[:, None]))
    return _verdict(drafts, accepted, chosen[first + accepted])


def _prefix(right: Tensor) -> Tensor:
    """bool [B, K] -> int64 [B]: how many come before the first False."""
    return right.long().cumprod(dim=1).sum(dim=1)


def _verdict(drafts: Tensor, accepted: Tensor, token: Tensor) -> Verdict:
    tokens = torch.cat([drafts, drafts[:, :1]], dim=1)
    at = torch.arange(tokens.shape[1], device=drafts.device)
    tokens = torch.where(at < accepted[:, None], tokens, torch.where(at == accepted[:, None], token[:, None], -1))
    return Verdict(accepted, tokens)
