"""Which slot computes which row's expert, where an expert lies in several (``split.cu``)."""

from __future__ import annotations

import torch
from torch import Tensor

from . import jit

BLOCKS, THREADS = 8, 512  # of a cluster, as in split.cu


def kernel(experts: int, shared: int, ranks: int, arch: str = jit.ARCH) -> jit.Kernel:
    """Clusters are all that it asks of a GPU, so it runs on Blackwell too."""
    return jit.kernel("split.cu", "assign_slots", arch=arch, EXPERTS=experts, SHARED=shared, RANKS=ranks)


def assign_slots(
    ids: Tensor, home: Tensor, shared: Tensor, slots: Tensor, per_rank: int, rounds: int
) -> tuple[Tensor, Tensor]:
    experts, (several, ranks) = home.shape[0], slots.shape
    ids = ids.contiguous()
    out = torch.empty_like(ids)
    if not ids.numel():
        return out, torch.zeros_like(home)
    counts = torch.empty_like(home)
    kernel(experts, several, ranks, jit.arch_of(ids.device)).launch(
        (BLOCKS,),
        THREADS,
        shared_bytes(experts),
        ids,
        home.contiguous(),
        shared.contiguous(),
        slots.contiguous(),
        out,
        counts,
        ids.numel(),
        per_rank,
        rounds,
        overlap=True,
    )
    return out, counts


def shared_bytes(experts: int) -> int:
    """Dynamic shared memory: pairs of each expert, a warp."""
    return THREADS // 32 * experts * 4
