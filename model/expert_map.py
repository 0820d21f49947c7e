"""Where the experts of a set lie while the network runs, and which replica computes what.

Every rank has the whole map and sees the expert ids of all rows, so all come to the same division of the work without a
word: integers from the same numbers (``Ops.assign_slots``). The map changes between forwards only, in place.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_plugin.kernels import Ops


class ExpertMap:
    """placement: int64 [layers, physical] the expert in every slot, on the host. ``slots``: of a rank.

    On the device, as ``Ops.assign_slots`` takes them: ``home`` int64 [layers, experts + 1] the slot of an expert that
    has one, and in the end that of expert -1, which is -1; ``shared`` int32 [layers, K] the experts that have several,
    ``replicas`` int32 [layers, K, ranks] theirs. As many of these as could have several, so that sizes outlive a
    placement. ``local`` int64 [ranks, physical + 1]: every slot, and in the end slot -1, counted from a rank's first;
    -1 if it is another's.

    forwards: with rows, so far. counts: int64 [layers, experts] rows of the latest, if somebody wants to know them.
    """

    def __init__(self, placement: NDArray[np.int64], experts: int, ranks: int):
        self.placement = np.array(placement, dtype=np.int64)
        self.experts, self.ranks = experts, ranks
        layers, physical = self.placement.shape
        self.slots = physical // ranks
        several = min(physical - experts, experts)
        self.home = torch.full((layers, experts + 1), -1, dtype=torch.int64)
        self.shared = torch.empty(layers, several, dtype=torch.int32)
        self.replicas = torch.empty(layers, several, ranks, dtype=torch.int32)
        self._fill(range(layers))
        self.local = torch.full((ranks, physical + 1), -1, dtype=torch.int64)
        for rank in range(ranks):
            self.local[rank, rank * self.slots :][: self.slots] = torch.arange(self.slots)
        self.counts: Tensor | None = None
        self.forwards = 0

    def move(self, changes: Iterable[tuple[int, int, int]]) -> None:
        """(layer, slot among all ranks', expert): what lies there from now on."""
        changes = list(changes)
        for layer, slot, expert in changes:
            self.placement[layer, slot] = expert
        self._fill(sorted({layer for layer, _, _ in changes}))

    def _fill(self, layers: Iterable[int]) -> None:
        for layer in layers:
            placed = self.placement[layer]
            slots = np.argsort(placed, kind="stable")
            home = slots[np.searchsorted(placed[slots], np.arange(self.experts))]
            several = np.flatnonzero(np.bincount(placed, minlength=self.experts) > 1)
            home[several] = -1 - np.arange(len(several))
            shared = np.full(self.shared.shape[1], -1, dtype=np.int32)
            shared[: len(several)] = several
            replicas = np.full(self.replicas.shape[1:], -1, dtype=np.int32)
            copies = slots[home[placed[slots]] < 0]
            replicas[-1 - home[placed[copies]], copies // self.slots] = copies
            for table, values in (
                (self.home[layer, :-1], home),
                (self.shared[layer], shared),
                (self.replicas[layer], replicas),
            ):
                _copy(table, values)

    def assign(self, ops: Ops, layer: int, ids: Tensor) -> Tensor:
        """int64 [T, k] slots that compute expert ids int64 [T, k], which are those of all rows on all ranks; -1 for
        none, in a row of padding."""
        self.forwards += layer == 0
        counts = None if self.counts is None else self.counts[layer]
        home, shared = self.home[layer], self.shared[layer]
        if shared.shape[0]:
            slots, found = ops.assign_slots(ids, home[:-1], shared, self.replicas[layer], self.slots, split_rounds(ops))
            if counts is not None:
                counts.copy_(found)
            return slots
        if counts is not None:
            flat = ids.flatten()
            counts.zero_().scatter_add_(0, flat.clamp(min=0), (flat >= 0).to(torch.int64))
        return home[ids]


def split_rounds(ops: Ops) -> int:
    """Of ``Ops.assign_slots``: none where they are plain operations, which would take longer than they save."""
    return 0 if ops.choices["assign_slots"] == "ascend" else 8


def _copy(into: Tensor, values: NDArray[np.generic]) -> None:
    """Without waiting for the device, which a copy from memory that is not pinned does."""
    host = torch.from_numpy(values)
    into.copy_(host if into.device.type in ("cpu", "meta") else host.pin_memory(), non_blocking=True)
