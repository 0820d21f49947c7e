"""Drafts for requests that sample: drawn with the noise that the network's own draw will use.

A seeded draw is the best of log p(token) + noise(seed, position, token) (``seeded_draw``). A draft that is the best of
what the head says plus the same noise is the same token wherever head and network agree well enough, far more often
than the head's likeliest token is. What is emitted is the network's own draw whatever was drafted, so nothing here can
change a distribution, and none of it must match the sampler to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .seeded_draw import gumbel, hash32

CANDIDATES = 64  # of the head's likeliest tokens; noise for a whole vocabulary would cost more than it finds


@dataclass(frozen=True)
class Draws:
    """How B requests sample. A top_k of 1 is greedy."""

    seeds: Tensor  # int64 [B]
    top_ks: Tensor  # int64 [B]
    temperatures: Tensor  # float32 [B], positive
    top_ps: Tensor  # float32 [B]
    min_ps: Tensor  # float32 [B]

    def at(self, index: Tensor | slice) -> Draws:
        return Draws(*(getattr(self, field.name)[index] for field in fields(self)))


def draft(logits: Tensor, positions: Tensor, draws: Draws) -> Tensor:
    """int64 [B]: tokens that the network will draw after tokens at ``positions`` int64 [B] if the head is right.

    logits: float32 [B, vocab] of the head. A greedy request gets the likeliest token, the first of equals.
    """
    ranked, tokens = logits.topk(min(CANDIDATES, logits.shape[1]))
    scaled = ranked / draws.temperatures[:, None]
    probs = (scaled - (logits / draws.temperatures[:, None]).logsumexp(-1, keepdim=True)).exp()
    excluded = torch.arange(ranked.shape[1], device=logits.device) >= draws.top_ks[:, None]
    excluded |= probs.cumsum(-1) - probs > draws.top_ps[:, None]
    excluded |= probs < probs[:, :1] * draws.min_ps[:, None]
    noise = gumbel(hash32(draws.seeds, positions, tokens))
    best = (noise + scaled.double()).masked_fill(excluded, -torch.inf).argmax(-1)
    drawn = tokens.gather(1, best[:, None])[:, 0]
    return torch.where(draws.top_ks == 1, logits.argmax(-1), drawn)
