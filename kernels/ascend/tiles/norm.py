"""rms_norm of a row: partial sums of squares by lane, then one sum, in float32; one rounding."""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor


@tilelang.jit(target="ascend")
def normed(X, W, Y, eps: float = 1e-20, cores: int = 64, threads: int = 256):
    """X bf16 [R, D], W bf16 [D] -> Y bf16 [R, D]; D a multiple of 32."""
    R = T.dynamic("R")
    D = T.const("D")
    X: T.Tensor((R, D), T.bfloat16)
    W: T.Tensor((D,), T.bfloat16)
    Y: T.Tensor((R, D), T.bfloat16)
    with T.Kernel(cores) as core:
        w = T.alloc_shared((D,), T.bfloat16)
        x = T.alloc_shared((D,), T.bfloat16)
        y = T.alloc_shared((D,), T.bfloat16)
        part = T.alloc_shared((D // 32,), T.float32)
        whole = T.alloc_shared((1,), T.float32)
        T.copy(W, w)
        for r in T.Persistent([R], cores, core):
            T.copy(X[r, :], x)
            with T.SimtVF(threads=threads):
                for i in T.Parallel(D // 32):
                    total = T.alloc_var(T.float32)
                    total = T.float32(0.0)
                    for k in T.serial(32):
                        total = total + T.cast(x[i * 32 + k], "float32") * T.cast(x[i * 32 + k], "float32")
                    part[i] = total
                for _ in T.Parallel(1):
                    total = T.alloc_var(T.float32)
                    total = T.float32(0.0)
                    for i in T.serial(D // 32):
                        total = total + part[i]
                    whole[0] = T.float32(1.0) / T.sqrt(total / T.float32(D) + T.float32(eps))
                for d in T.Parallel(D):
                    y[d] = T.cast(T.cast(x[d], "float32") * whole[0] * T.cast(w[d], "float32"), "bfloat16")
            T.copy(y, Y[r, :])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normed(x.contiguous(), weight.contiguous(), out, eps=eps)
    return out
