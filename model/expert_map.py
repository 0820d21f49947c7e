"""Where the experts of a set lie while the network runs, and which replica computes what.

Every rank has the whole map and sees the expert ids of all rows, so all come to the same division of the work without a
word: integers from the same numbers. The map changes between forwards only, in place.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class ExpertMap:
    """placement: int64 [layers, physical] the expert in every slot, on the host. ``slots``: of a rank.

    weights: float64 [layers, ranks], on the host. An expert's rows are shared by its replicas in proportion to the
    weights of their ranks; at first all are 1.

    On the device ``replicas`` int64 [layers, experts, most]: the slots of every expert, ascending, -1 behind the last;
    ``shares`` float64, alike: what each takes of the expert's rows.

    forwards: with rows, so far. counts: int64 [layers, experts] rows of the latest, if somebody wants to know them.
    """

    def __init__(self, placement: NDArray[np.int64], experts: int, ranks: int):
        self.placement = np.array(placement, dtype=np.int64)
        self.experts, self.ranks = experts, ranks
        layers, physical = self.placement.shape
        self.slots = physical // ranks
        self.weights = np.ones((layers, ranks))
        most = max(1, min(ranks, physical - experts + 1))
        self.replicas = torch.full((layers, experts, most), -1, dtype=torch.int64)
        self.shares = torch.zeros(layers, experts, most, dtype=torch.float64)
        self._fill(range(layers))
        self.counts: Tensor | None = None
        self.forwards = 0

    def move(self, changes: Iterable[tuple[int, int, int]]) -> None:
        """(layer, slot among all ranks', expert): what lies there from now on."""
        changes = list(changes)
        for layer, slot, expert in changes:
            self.placement[layer, slot] = expert
        self._fill(sorted({layer for layer, _, _ in changes}))

    def weigh(self, weights: NDArray[np.float64]) -> None:
        """New weights [layers, ranks], all above 0."""
        self.weights = np.array(weights, dtype=np.float64)
        self._fill(range(len(weights)))

    def _fill(self, layers: Iterable[int]) -> None:
        most = self.replicas.shape[2]
        for layer in layers:
            slots = np.argsort(self.placement[layer], kind="stable")
            experts = self.placement[layer, slots]
            which = np.arange(len(slots)) - np.searchsorted(experts, experts)
            table, shares = np.full((self.experts, most), -1, dtype=np.int64), np.zeros((self.experts, most))
            table[experts, which] = slots
            shares[experts, which] = self.weights[layer, slots // self.slots]
            _copy(self.replicas[layer], table)
            _copy(self.shares[layer], shares / shares.sum(1, keepdims=True))

    def assign(self, layer: int, ids: Tensor) -> Tensor:
        """int64 [T, k] slots that compute expert ids int64 [T, k], which are those of all rows on all ranks."""
        self.forwards += layer == 0
        flat, replicas = ids.flatten(), self.replicas[layer]
        if replicas.shape[1] == 1 and self.counts is None:
            return replicas[flat, 0].view(ids.shape)
        counts = torch.zeros(self.experts, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        if self.counts is not None:
            self.counts[layer].copy_(counts)
        if replicas.shape[1] == 1:
            return replicas[flat, 0].view(ids.shape)
        ends = quotas(self.shares[layer], replicas >= 0, counts).cumsum(1)
        # The n-th row of an expert goes to the first replica whose quota, with those before it, covers n.
        order = flat.argsort(stable=True)
        begins = counts.cumsum(0) - counts
        nth = torch.empty_like(flat)
        nth[order] = torch.arange(flat.shape[0], device=flat.device) - begins[flat[order]]
        replica = (nth[:, None] >= ends[flat]).sum(1)
        return replicas[flat, replica].view(ids.shape)


def _copy(into: Tensor, values: NDArray[np.generic]) -> None:
    """Without waiting for the device, which a copy from memory that is not pinned does."""
    host = torch.from_numpy(values)
    into.copy_(host.pin_memory() if torch.accelerator.is_available() else host, non_blocking=True)


def quotas(shares: Tensor, there: Tensor, counts: Tensor) -> Tensor:
    """int64 [experts, most] rows of each replica: counts int64 [experts] divided by shares float64 [experts, most], by
    largest remainder, so less than one off the exact share. there: bool, which replicas exist; the shares of the others
    are 0, those of an expert add up to 1."""
    exact = shares * counts[:, None]
    whole = exact.floor()
    remainder = torch.where(there, exact - whole, -1.0)
    left = counts - whole.sum(1).to(torch.int64)
    rank = torch.empty_like(there, dtype=torch.int64)
    order = remainder.argsort(dim=1, descending=True, stable=True)
    rank.scatter_(1, order, torch.arange(there.shape[1], device=there.device).expand_as(order))
    return whole.to(torch.int64) + (rank < left[:, None])
