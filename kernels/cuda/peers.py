"""Results of experts between the GPUs of a host: every rank writes what it has made straight into the memory of the
rank that wants it, at its place, and a barrier on the device says that all have. No size is asked of the host, so a
forward that sends this way can be captured in a graph.

_send: a program is a pair of a row and a choice. Those that are another rank's end at once.

_sum: a program is 1024 channels of a row. It adds the choices in ascending order of their experts, in float32 from
zero, as ``combine`` in ``experts.cuh`` does.
"""

from __future__ import annotations

import logging
import math
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import narrow, widen
from .overlap import OVERLAP, after_previous

BLOCK = 1024
ALIGNED = 128  # bytes at a multiple of which each half of a rank's memory begins
TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.uint8: tl.uint8}
logger = logging.getLogger(__name__)


@triton.jit(do_not_specialize=["rows"])
def _send(
    made,
    local,
    memories,
    offset,
    rows,
    SIZE: tl.constexpr,
    CHOICES: tl.constexpr,
    WIDTH: tl.constexpr,
    TYPE: tl.constexpr,
    BYTES: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    after_previous()
    pair = tl.program_id(0).to(tl.int64)
    if tl.load(local + pair) >= 0:
        row = pair // CHOICES
        group, place = row // rows, row % rows
        member = ((place + 1) * SIZE - 1) // rows  # of its group: the owner of the row
        first = rows * member // SIZE
        memory = tl.load(memories + group * SIZE + member) + offset
        memory += ((place - first) * CHOICES + pair % CHOICES) * (WIDTH * BYTES)
        memory = tl.multiple_of(memory.to(tl.pointer_type(TYPE)), ALIGN)
        for start in range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(made + pair * WIDTH + column, mask=column < WIDTH)
            tl.store(memory + column, narrow(value, TYPE), mask=column < WIDTH)


@triton.jit
def _sum(arrived, ids, out, CHOICES: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.arange(0, PADDED)
    expert = tl.load(ids + row * CHOICES + choice, mask=choice < CHOICES, other=-1)
    earlier = (expert[None, :] < expert[:, None]) | ((expert[None, :] == expert[:, None]) & (choice < choice[:, None]))
    order = tl.sum(earlier.to(tl.int32), 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in tl.static_range(PADDED - CHOICES, PADDED):  # what is no choice comes first
        next = tl.sum(tl.where(order == at, choice, 0), 0)
        there = tl.sum(tl.where(order == at, expert, 0), 0) >= 0
        value = tl.load(arrived + (row * CHOICES + next) * WIDTH + column, mask=there & (column < WIDTH), other=0.0)
        total += widen(value)
    tl.store(out + row * WIDTH + column, total, mask=column < WIDTH)


def send(made: Tensor, local: Tensor, memories: Tensor, offset: int, rows: int, size: int, dtype: torch.dtype) -> None:
    """``Peers.send`` without the barrier: memories int64 [ranks], addresses; offset: bytes from there."""
    total, choices, width = made.shape
    if not total:
        return
    _send[(total * choices,)](
        made.contiguous(),
        local.contiguous(),
        memories,
        offset,
        rows,
        size,
        choices,
        width,
        TYPES[dtype],
        dtype.itemsize,
        math.gcd(16, width * dtype.itemsize),
        min(BLOCK, triton.next_power_of_2(width)),
        **OVERLAP,
    )


def ascending_sum(arrived: Tensor, ids: Tensor) -> Tensor:
    """Float32 [n, H]: arrived [n, k, H] added in ascending order of ids int64 [n, k], without those whose id is -1."""
    count, choices, width = arrived.shape
    out = torch.empty(count, width, dtype=torch.float32, device=arrived.device)
    if not count:
        return out
    block = min(BLOCK, triton.next_power_of_2(width))
    _sum[(count, triton.cdiv(width, block))](
        arrived,
        ids.contiguous(),
        out,
        choices,
        triton.next_power_of_2(choices),
        width,
        block,
        **OVERLAP,
    )
    return out


class PeerMemory:
    """``model.captured.Peers`` between the ranks of a process group, in memory of every rank that all the others have
    mapped. It has two halves, used in turn: who writes a half again has since then met the reader at a barrier.

    Making it fails alike on all ranks where one cannot map another's memory.
    """

    def __init__(self, group: Any, device: torch.device):
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # we use none, and some machines have none
        self.group, self.device = group, device
        self.half, self.turn = 0, 0
        self.kept: list[Any] = []  # smaller memories, which earlier graphs have the addresses of
        self._reserve(ALIGNED)

    def _reserve(self, half: int) -> None:
        from torch.distributed import _symmetric_memory

        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"a captured forward sends {half} bytes a rank; those captured before had {self.half}")
        self.half = -(-half // ALIGNED) * ALIGNED
        try:
            self.own = _symmetric_memory.empty(2 * self.half, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:  # the driver's; it cannot use what PyTorch keeps, nor is it PyTorch's own kind
            if "out of memory" not in str(error):
                raise
            raise torch.OutOfMemoryError(f"{2 * self.half} bytes for what ranks send each other: {error}") from None
        self.handle = _symmetric_memory.rendezvous(self.own, self.group)
        self.memories = torch.tensor(self.handle.buffer_ptrs, dtype=torch.int64, device=self.device)
        self.kept.append((self.own, self.handle, self.memories))

    def begin(self) -> None:
        self.turn = 0
        self.handle.barrier()

    def send(self, made: Tensor, local: Tensor, rows: int, size: int, dtype: torch.dtype) -> Tensor:
        choices, width = made.shape[1:]
        most = -(-rows // size) * choices * width * dtype.itemsize
        if most > self.half:
            self._reserve(most)
        offset, self.turn = self.turn % 2 * self.half, self.turn + 1
        send(made, local, self.memories, offset, rows, size, dtype)
        self.handle.barrier()
        member = self.handle.rank % size
        own = rows * (member + 1) // size - rows * member // size
        arrived = self.own[offset : offset + own * choices * width * dtype.itemsize]
        return arrived.view(dtype).view(own, choices, width)

    def ascending_sum(self, arrived: Tensor, ids: Tensor) -> Tensor:
        return ascending_sum(arrived, ids)
