"""confidence: the product of a draft's hidden state and embedding with one row of weights, in float32."""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor


@tilelang.jit(target="ascend")
def product(X, E, W, Y, cores: int = 64, threads: int = 256):
    """X bf16 [R, H], E bf16 [R, N], W bf16 [H + N] -> Y float32 [R, 8], the sum in the first column. H and N multiples
    of 32; the row is as wide as a transfer."""
    R = T.dynamic("R")
    H, N = T.const("H, N")
    X: T.Tensor((R, H), T.bfloat16)
    E: T.Tensor((R, N), T.bfloat16)
    W: T.Tensor((H + N,), T.bfloat16)
    Y: T.Tensor((R, 8), T.float32)
    with T.Kernel(cores) as core:
        w = T.alloc_shared((H + N,), T.bfloat16)
        x = T.alloc_shared((H,), T.bfloat16)
        e = T.alloc_shared((N,), T.bfloat16)
        part = T.alloc_shared(((H + N) // 32,), T.float32)
        y = T.alloc_shared((8,), T.float32)
        T.copy(W, w)
        for r in T.Persistent([R], cores, core):
            T.copy(X[r, :], x)
            T.copy(E[r, :], e)
            with T.SimtVF(threads=threads):
                for i in T.Parallel(H // 32):
                    total = T.alloc_var(T.float32)
                    total = T.float32(0.0)
                    for c in T.serial(32):
                        total = total + T.cast(x[i * 32 + c], "float32") * T.cast(w[i * 32 + c], "float32")
                    part[i] = total
                for i in T.Parallel(N // 32):
                    total = T.alloc_var(T.float32)
                    total = T.float32(0.0)
                    for c in T.serial(32):
                        total = total + T.cast(e[i * 32 + c], "float32") * T.cast(w[H + i * 32 + c], "float32")
                    part[H // 32 + i] = total
                for j in T.Parallel(8):
                    total = T.alloc_var(T.float32)
                    total = T.float32(0.0)
                    for i in T.serial((H + N) // 32):
                        total = total + part[i]
                    y[j] = total
            T.copy(y, Y[r, :])


def confidence(hidden: Tensor, e: Tensor, proj: Tensor) -> Tensor:
    out = torch.empty(hidden.shape[0], 8, dtype=torch.float32, device=hidden.device)
    product(hidden.contiguous(), e.contiguous(), proj.flatten(), out)
    return out[:, 0].contiguous()
