"""hc_expand: each stream of a row from the output of the sub-layer and the streams before it, rounded once."""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor


@tilelang.jit(target="ascend")
def expand(O, S, P, C, Y, cores: int = 64, threads: int = 512):  # noqa: E741
    """O bf16 [R, H], S bf16 [R, M, H], P float32 [R, M], C float32 [R, M, M] (source, target) -> Y bf16 [R, M, H]."""
    R = T.dynamic("R")
    M, H = T.const("M, H")
    O: T.Tensor((R, H), T.bfloat16)  # noqa: E741
    S: T.Tensor((R, M, H), T.bfloat16)
    P: T.Tensor((R, M), T.float32)
    C: T.Tensor((R, M, M), T.float32)
    Y: T.Tensor((R, M, H), T.bfloat16)
    with T.Kernel(cores) as core:
        o = T.alloc_shared((H,), T.bfloat16)
        s = T.alloc_shared((M, H), T.bfloat16)
        p = T.alloc_shared((M,), T.float32)
        c = T.alloc_shared((M, M), T.float32)
        for r in T.Persistent([R], cores, core):
            T.copy(O[r, :], o)
            T.copy(S[r, :, :], s)
            T.copy(P[r, :], p)
            T.copy(C[r, :, :], c)
            y = T.alloc_shared((M, H), T.bfloat16)
            with T.SimtVF(threads=threads):
                for k, h in T.Parallel(M, H):
                    total = T.alloc_var(T.float32)
                    total = p[k] * T.cast(o[h], "float32")
                    for j in T.serial(M):
                        total = total + c[j, k] * T.cast(s[j, h], "float32")
                    y[k, h] = T.cast(total, "bfloat16")
            T.copy(y, Y[r, :, :])


def hc_expand(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    result = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    expand(out.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous(), result)
    return result
