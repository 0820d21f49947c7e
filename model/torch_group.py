"""A ``Group`` over ``torch.distributed``: gloo on a CPU, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The same function under its new name and its old one.
gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchGroup:
    """Tensors travel over ``device_group``, by default all ranks, as bytes, which every backend knows; numbers and
    objects over ``cpu_group``, by default the same.

    waiting: entered around every wait for other ranks; a watchdog looks in.
    """

    def __init__(
        self,
        device_group: Any = None,
        cpu_group: Any = None,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        self.device_group: Any = device_group or dist.group.WORLD
        self.cpu_group: Any = cpu_group or self.device_group
        self.waiting = waiting
        self.rank, self.size = dist.get_rank(self.device_group), dist.get_world_size(self.device_group)

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.size, *x.shape)
        with self.waiting():
            gather_into(as_bytes(out), as_bytes(x), group=self.device_group)
        return out

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        out = x.new_empty(sum(receive), *x.shape[1:])
        width = x[:1].nbytes if x.shape[0] else out[:1].nbytes
        with self.waiting():
            dist.all_to_all_single(
                as_bytes(out),
                as_bytes(x.contiguous()),
                [count * width for count in receive],
                [count * width for count in send],
                group=self.device_group,
            )
        return out

    def host_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        own = torch.tensor(numbers, dtype=torch.int64)
        out = torch.empty(self.size, len(numbers), dtype=torch.int64)
        with self.waiting():
            gather_into(out.flatten(), own, group=self.cpu_group)
        return out.tolist()

    def from_first(self, value: Any) -> Any:
        held = [value]
        with self.waiting():
            dist.broadcast_object_list(held, dist.get_global_rank(self.cpu_group, 0), group=self.cpu_group)
        return held[0]

    def tensor_from_first(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        with self.waiting():
            dist.broadcast(x, dist.get_global_rank(self.device_group, 0), group=self.device_group)
        return x


def as_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor as the bytes it consists of."""
    return x.flatten().view(torch.uint8)
