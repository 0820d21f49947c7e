"""hc_collapse: the streams of a row, weighted and added in float32, rounded once."""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor


@tilelang.jit(target="ascend")
def collapse(S, P, Y, cores: int = 64, threads: int = 512):
    """S bf16 [R, M, H], P float32 [R, M] -> Y bf16 [R, H]."""
    R = T.dynamic("R")
    M, H = T.const("M, H")
    S: T.Tensor((R, M, H), T.bfloat16)
    P: T.Tensor((R, M), T.float32)
    Y: T.Tensor((R, H), T.bfloat16)
    with T.Kernel(cores) as core:
        s = T.alloc_shared((M, H), T.bfloat16)
        p = T.alloc_shared((M,), T.float32)
        y = T.alloc_shared((H,), T.bfloat16)
        for r in T.Persistent([R], cores, core):
            T.copy(S[r, :, :], s)
            T.copy(P[r, :], p)
            with T.SimtVF(threads=threads):
                for h in T.Parallel(H):
                    total = T.alloc_var(T.float32)
                    total = T.cast(s[0, h], "float32") * p[0]
                    for m in T.serial(1, M):
                        total = total + T.cast(s[m, h], "float32") * p[m]
                    y[h] = T.cast(total, "bfloat16")
            T.copy(y, Y[r, :])


def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    out = torch.empty(streams.shape[0], streams.shape[2], dtype=streams.dtype, device=streams.device)
    collapse(streams.contiguous(), pre.contiguous(), out)
    return out
