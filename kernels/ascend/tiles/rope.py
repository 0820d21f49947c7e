"""rope: pairs of the last channels turned by position times frequency, whole turns taken off first."""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor

from ..norm_rope import REST, TURN


@tilelang.jit(target="ascend")
def turned(X, P, F, Y, sign: float = 1.0, cores: int = 64, threads: int = 512):
    """X bf16 [R, heads, D], P float32 [R], F float32 [n] -> Y bf16 [R, heads, D]; sign -1 turns back."""
    R = T.dynamic("R")
    A, D, N = T.const("A, D, N")
    X: T.Tensor((R, A, D), T.bfloat16)
    P: T.Tensor((R,), T.float32)
    F: T.Tensor((N,), T.float32)
    Y: T.Tensor((R, A, D), T.bfloat16)
    with T.Kernel(cores) as core:
        x = T.alloc_shared((A, D), T.bfloat16)
        p = T.alloc_shared((1,), T.float32)
        f = T.alloc_shared((N,), T.float32)
        cosine = T.alloc_shared((N,), T.float32)
        sine = T.alloc_shared((N,), T.float32)
        T.copy(F, f)
        for r in T.Persistent([R], cores, core):
            T.copy(X[r, :, :], x)
            T.copy(P[r : r + 1], p)
            with T.SimtVF(threads=threads):
                for n in T.Parallel(N):
                    angle = T.alloc_var(T.float32)
                    angle = p[0] * f[n]
                    whole = T.floor(angle * T.float32(1 / 6.283185307179586) + T.float32(0.5))
                    angle = angle - whole * T.float32(TURN[0])
                    angle = angle - whole * T.float32(TURN[1])
                    angle = angle - whole * T.float32(TURN[2])
                    angle = angle - whole * T.float32(REST)
                    cosine[n] = T.cos(angle)
                    sine[n] = T.sin(angle) * T.float32(sign)
                for a, n in T.Parallel(A, N):
                    even = T.alloc_var(T.float32)
                    odd = T.alloc_var(T.float32)
                    even = T.cast(x[a, D - 2 * N + 2 * n], "float32")
                    odd = T.cast(x[a, D - 2 * N + 2 * n + 1], "float32")
                    x[a, D - 2 * N + 2 * n] = T.cast(even * cosine[n] - odd * sine[n], "bfloat16")
                    x[a, D - 2 * N + 2 * n + 1] = T.cast(odd * cosine[n] + even * sine[n], "bfloat16")
            T.copy(x, Y[r, :, :])


def rope(x: Tensor, positions: Tensor, inv_freq: Tensor, inverse: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = x.contiguous().view(x.shape[0], -1, x.shape[-1])
    turned(flat, positions.to(torch.float32), inv_freq.contiguous(), out.view_as(flat), sign=-1.0 if inverse else 1.0)
    return out
