"""Which drafts of a ragged verify block were right, and the token that follows them.

Exact: every emitted token is one that the target chose or drew itself, at a row that ran whatever that row drew. How
drafts were made, and how many are verified, decides how many of these tokens a step yields and not which.

Everything is a tensor operation of fixed shape: no host synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """What B requests emit. Draft j of request b was judged by row ``cu_rows[b] + j``, and so was emitted token j."""

    accepted: Tensor  # int64 [B] drafts accepted, 0..K
    tokens: Tensor  # int64 [B, K+1] the accepted drafts, then one token of the target's, then -1

    @property
    def emitted(self) -> Tensor:
        """int64 [B] tokens emitted, 1..K+1."""
        return self.accepted + 1


def accept(chosen: Tensor, cu_rows: Tensor, drafts: Tensor) -> Verdict:
    """A draft is right iff it is the target's token at its place and those before it are right.

    chosen: int64 [R] the target's token after each verify row; rows beyond ``cu_rows[-1]`` are padding. cu_rows: int64
    [B+1] first row of each request: its anchor, then the drafts that are verified (at most K). drafts: int64 [B, K].
    """
    first, limit = cu_rows[:-1], cu_rows.diff() - 1
    offsets = torch.arange(drafts.shape[1], device=drafts.device)
    rows = (first[:, None] + offsets).clamp_(max=chosen.shape[0] - 1)  # judge of each draft, where there is one
    right = (drafts == chosen[rows]) & (offsets < limit[:, None])
    accepted = right.long().cumprod(dim=1).sum(dim=1)
    tokens = torch.cat([drafts, drafts[:, :1]], dim=1)
    at, last = torch.arange(tokens.shape[1], device=drafts.device), chosen[first + accepted]
    tokens = torch.where(at < accepted[:, None], tokens, torch.where(at == accepted[:, None], last[:, None], -1))
    return Verdict(accepted, tokens)
