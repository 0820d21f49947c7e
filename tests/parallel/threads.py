"""Ranks as threads of one process, for what needs no process of its own: a ``Group`` that meets at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
PATIENCE_S = 30


class Meeting:
    """Where ``size`` threads exchange what they have."""

    def __init__(self, size: int):
        self.size, self.held = size, [None] * size
        self.barrier = threading.Barrier(size)

    def all(self, rank: int, value: Any) -> list[Any]:
        """Everybody's value.

        Raises:
            threading.BrokenBarrierError: another rank ended or does not come.
        """
        self.held[rank] = value
        self.barrier.wait(PATIENCE_S)
        found = list(self.held)
        self.barrier.wait(PATIENCE_S)
        return found


class ThreadGroup:
    def __init__(self, meeting: Meeting, rank: int):
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

    def all_gather(self, x: Tensor) -> Tensor:
        parts = self.meeting.all(self.rank, x)
        assert len({(part.shape, part.dtype) for part in parts}) == 1
        return torch.stack(parts)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        parts = [part[self.rank] for part in self.meeting.all(self.rank, x.split(list(send)))]
        assert [part.shape[0] for part in parts] == list(receive)
        return torch.cat(parts)

    def host_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(held) for held in self.meeting.all(self.rank, list(numbers))]

    def from_first(self, value: Any) -> Any:
        return self.meeting.all(self.rank, value)[0]

    def tensor_from_first(self, x: Tensor) -> Tensor:
        return self.meeting.all(self.rank, x)[0].clone()


def run(ranks: int, body: Callable[[int, Meeting], T]) -> list[T]:
    """What ``body(rank, meeting of all)`` returns on each rank; the first error of one ends all."""
    meeting = Meeting(ranks)

    def guarded(rank: int) -> T:
        try:
            return body(rank, meeting)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
