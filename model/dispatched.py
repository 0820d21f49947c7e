"""An exchange whose rows go straight to the ranks that hold their experts, without asking the host how many go where.

What carries them is injected (``Courier``): a vendor's expert-parallel op. Every rank makes the same calls with the
same number of rows, also a rank that has none; how many calls follows from numbers of rows that all ranks know.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from .parallel import ExpertSum, Ranks, Travelling, ascending_sum

TAIL = 32  # channels behind a row that carry its routing weight and expert


class Courier(Protocol):
    """Carries rows to ranks and what became of them back. All ranks make the same calls."""

    def rows(self, hidden: int, dtype: torch.dtype) -> int:
        """Rows of each rank in one call; 0: such rows cannot be carried."""

    def send(self, x: Tensor, ranks: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Any]:
        """x [n, H], ranks int32 [n], live bool [n], live rows first -> rows that arrived [n * size, H], of which the
        first are in use, how many of them, int64 [1], and what ``back`` needs."""

    def back(self, results: Tensor, ranks: Tensor, live: Tensor, sent: Any) -> Tensor:
        """results [n * size, H] of the rows that arrived -> [n, H] of those that were sent."""


class Dispatched(Travelling):
    """``Travelling``, but pairs of row and expert travel by courier where it can carry them; the same bits."""

    def __init__(self, ranks: Ranks, counts: Sequence[int], courier: Courier):
        super().__init__(ranks, counts)
        self.courier = courier

    def routed(self, experts: ExpertSum, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        step = self.courier.rows(x.shape[1] + TAIL, x.dtype)
        if not step:
            return super().routed(experts, x, weights, ids)
        # Of all rows: a balancer must see the same numbers on every rank.
        slots = experts.assign(self.everywhere(ids))[self.mine.start : self.mine.stop].flatten()
        x, weights, ids = self.own(x), self.own(weights), self.own(ids)
        choices = ids.shape[1]
        holders, local = slots // experts.slots, slots % experts.slots
        pairs = [choices * (after - before) for before, after in pairwise(self.bounds)]  # of each rank
        made = [x.new_empty(0, x.shape[1])]
        for first in range(0, max(pairs), step):
            mine = range(first, max(first, min(first + step, holders.shape[0])))
            part = slice(mine.start, mine.stop)
            message = _message(x[torch.arange(mine.start, mine.stop, device=x.device) // choices], weights, local, part)
            arriving = sum(min(max(count - first, 0), step) for count in pairs)
            made.append(self._call(experts, message, holders[part].to(torch.int32), step, arriving))
        return ascending_sum(torch.cat(made).unflatten(0, (len(self.mine), choices)), ids)

    def _call(self, experts: ExpertSum, message: Tensor, holders: Tensor, step: int, arriving: int) -> Tensor:
        """[n, H] of the pairs [n, H + TAIL] of this rank, at most ``step``; ``arriving``: pairs of all ranks."""
        count = message.shape[0]
        live = torch.arange(step, device=message.device) < count
        holders = torch.nn.functional.pad(holders, (0, step - count))
        message = torch.nn.functional.pad(message, (0, 0, 0, step - count))
        arrived, used, sent = self.courier.send(message, holders, live)
        capacity, arrived = arrived.shape[0], arrived[:arriving]
        tail = arrived[:, -TAIL:].contiguous().view(torch.int32)
        here = torch.arange(arriving, device=arrived.device) < used
        local = torch.where(here, tail[:, 0], -1).to(torch.int64)[:, None]
        weight = torch.where(here, tail[:, 1].contiguous().view(torch.float32), 0.0)[:, None]
        # An expert's output is one rounded number a channel: float32 here, as exact in the dtype of x.
        outputs = experts(arrived[:, :-TAIL].contiguous(), weight, local).to(message.dtype)
        outputs = torch.nn.functional.pad(outputs, (0, TAIL, 0, capacity - arriving))
        return self.courier.back(outputs, holders, live, sent)[:count, :-TAIL]


def _message(x: Tensor, weights: Tensor, local: Tensor, part: slice) -> Tensor:
    """Rows bf16 [n, H + TAIL]: the row, then the bits of expert and weight."""
    numbers = torch.stack((local[part].to(torch.int32), weights.flatten()[part].view(torch.int32)), 1)
    bits = torch.nn.functional.pad(numbers, (0, TAIL // 2 - 2)).contiguous()
    return torch.cat((x, bits.view(x.dtype)), 1)
