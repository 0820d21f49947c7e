"""The counts of the latest steps, on the device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_plugin.model.expert_map import ExpertMap
from deepinfer_plugin.runtime.transfer import to_host


class Window:
    """``ring`` int32 [steps, layers, experts]: rows of each expert in the latest steps of a set. A forward without rows
    is no step. Every rank sees the ids of all rows, so all windows are alike."""

    def __init__(self, places: ExpertMap, steps: int):
        self.places, device = places, places.home.device
        shape = len(places.placement), places.experts
        places.counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self.ring = torch.zeros(steps, *shape, dtype=torch.int32, device=device)
        self.seen = places.forwards
        self.steps = 0  # ever recorded

    def skip(self) -> None:
        """What has run so far is no step."""
        self.seen = self.places.forwards

    def record(self) -> bool:
        """Whether there has been a step since the last call, which is now in the ring."""
        if self.places.forwards == self.seen:
            return False
        assert self.places.counts is not None
        self.seen = self.places.forwards
        self.ring[self.steps % len(self.ring)].copy_(self.places.counts)
        self.steps += 1
        return True

    def snapshot(self) -> Callable[[], NDArray[np.int32]]:
        """What gives [steps so far, layers, experts], the oldest first, and waits for the device; call it in another
        thread."""
        steps, length, device = self.steps, len(self.ring), self.ring.device
        if device.type == "cpu":
            copied, wait = self.ring.clone(), lambda: None
        else:
            copied, arrived = to_host(self.ring), torch.Event(device)
            arrived.record()
            wait = arrived.synchronize

        def read() -> NDArray[np.int32]:
            wait()
            return np.roll(copied.numpy(), -(steps % length), axis=0)[max(0, length - steps) :]

        return read
