"""The exchange of a forward that is captured in a graph: every size is known before, nothing asks the host.

All groups run as many rows, padded. Each rank asks its experts for every pair of a row and a choice and gets nothing
for those of other ranks. What it has made it writes straight into the memory of the row's owner, at the place of row
and choice, so a pair travels once, and only if its expert is elsewhere.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .parallel import ExpertSum, Ranks, Travelling


class Peers(Protocol):
    """Memory of every rank that all others write to. All ranks make the same calls, whose sizes are the same in every
    replay."""

    def begin(self) -> None:
        """Before the first ``send`` of a forward: wait until every rank has read what it was sent in the last one."""

    def send(self, made: Tensor, local: Tensor, rows: int, size: int, dtype: torch.dtype) -> Tensor:
        """[own, k, D] of ``dtype``, this rank's memory: the results of its rows, from whoever made them, to be read
        before the send after the next.

        made: [total, k, D], exact in ``dtype``; those are this rank's whose ``local``, int64 [total, k], is not -1.
        Of each ``rows`` rows, those of a group of ``size`` ranks, member i owns those from rows * i // size on. What
        nobody has made is whatever was there before.
        """

    def ascending_sum(self, arrived: Tensor, ids: Tensor) -> Tensor:
        """``parallel.ascending_sum`` of what ``send`` returned, without the choices whose id is -1."""


class Captured(Travelling):
    """``rows`` of each group, of which the first ``live``, int64 [1] on the device, are no padding: that asks for no
    expert. The bits are those of ``Travelling``."""

    def __init__(self, ranks: Ranks, rows: int, live: Tensor, peers: Peers):
        super().__init__(ranks, [rows] * ranks.groups)
        self.rows, self.peers = rows, peers
        self.padding = torch.arange(rows, device=live.device)[:, None] >= live
        peers.begin()

    def routed(self, experts: ExpertSum, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        x, weights, ids = self.rows_everywhere(x, weights, ids.masked_fill(self.padding, -1))
        local = experts.local(experts.assign(ids))
        pairs = x[:, None].expand(-1, ids.shape[1], -1).flatten(0, 1)
        made = experts(pairs, weights.reshape(-1, 1), local.view(-1, 1))
        # An expert's output is one rounded number a channel: float32 here, as exact in the dtype of x.
        arrived = self.peers.send(made.unflatten(0, ids.shape), local, self.rows, self.ranks.group.size, x.dtype)
        return self.peers.ascending_sum(arrived, ids[self.mine.start : self.mine.stop])

    def lookup(self, table: Tensor, scale: Tensor, total: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        each = -(-total // self.ranks.experts.size)
        everyone = self.everywhere(rows)
        rank = self.ranks.experts.rank
        local = torch.where(everyone // each == rank, everyone - each * rank, -1)
        found = torch.cat([part.view(torch.uint8)[local.clamp(min=0)] for part in (table, scale)], 2)
        arrived = self.peers.send(found, local, self.rows, self.ranks.group.size, torch.uint8)
        return self.fetched(arrived, table, scale)
