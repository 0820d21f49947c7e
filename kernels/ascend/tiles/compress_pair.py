"""compress_pair: the pair an odd position completes, pooled by a softmax of two scores per channel."""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor


@tilelang.jit(target="ascend")
def pool(V, S, Y, position, fresh, slot, tail, cores: int = 64, threads: int = 256):
    """V, S float32 [R, D], tail float32 [slots, L, 2, D], strided -> Y bf16 [R, D]."""
    R, N = T.dynamic("R, N")
    D, L = T.const("D, L")
    t0, t1 = T.dynamic("t0, t1", "int64")
    V: T.Tensor((R, D), T.float32)
    S: T.Tensor((R, D), T.float32)
    Y: T.Tensor((R, D), T.bfloat16)
    position: T.Tensor((R,), T.int64)
    fresh: T.Tensor((R,), T.int64)
    slot: T.Tensor((R,), T.int64)
    tail: T.StridedTensor((N, L, 2, D), (t0, t1, D, 1), T.float32)
    with T.Kernel(cores) as core:
        value = T.alloc_shared((2, D), T.float32)
        score = T.alloc_shared((2, D), T.float32)
        y = T.alloc_shared((D,), T.bfloat16)
        for r in T.Persistent([R], cores, core):
            T.copy(V[r, :], value[1, :])
            T.copy(S[r, :], score[1, :])
            if fresh[r] > 0:
                T.copy(V[r - 1, :], value[0, :])
                T.copy(S[r - 1, :], score[0, :])
            else:
                T.copy(tail[slot[r], (position[r] + L - 1) % L, 0, :], value[0, :])
                T.copy(tail[slot[r], (position[r] + L - 1) % L, 1, :], score[0, :])
            odd = T.cast(position[r] % 2, "int32")
            with T.SimtVF(threads=threads):
                for d in T.Parallel(D):
                    top = T.alloc_var(T.float32)
                    first = T.alloc_var(T.float32)
                    second = T.alloc_var(T.float32)
                    top = T.max(score[0, d], score[1, d])
                    first = T.exp(score[0, d] - top)
                    second = T.exp(score[1, d] - top)
                    pooled = (value[0, d] * first + value[1, d] * second) / (first + second)
                    y[d] = T.cast(T.if_then_else(odd != 0, pooled, T.float32(0.0)), "bfloat16")
            T.copy(y, Y[r, :])


def compress_pair(
    value: Tensor,
    score: Tensor,
    positions: Tensor,
    fresh: Tensor,
    row_slots: Tensor,
    tail: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    out = torch.empty(value.shape, dtype=torch.bfloat16, device=value.device)
    pool(value.contiguous(), score.contiguous(), out, positions, fresh, row_slots, tail)
    return out
