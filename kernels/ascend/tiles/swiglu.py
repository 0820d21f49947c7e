"""swiglu: clamped gate and up, times the routing weight, in float32, rounded once."""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor


@tilelang.jit(target="ascend")
def gated(G, U, W, Y, limit: float = 10.0, cores: int = 64, threads: int = 256):
    """G, U bf16 [R, I], W float32 [R] -> Y bf16 [R, I]. limit: clamp, large for none."""
    R = T.dynamic("R")
    I = T.const("I")  # noqa: E741
    G: T.Tensor((R, I), T.bfloat16)
    U: T.Tensor((R, I), T.bfloat16)
    W: T.Tensor((R,), T.float32)
    Y: T.Tensor((R, I), T.bfloat16)
    with T.Kernel(cores) as core:
        g = T.alloc_shared((I,), T.bfloat16)
        u = T.alloc_shared((I,), T.bfloat16)
        w = T.alloc_shared((1,), T.float32)
        y = T.alloc_shared((I,), T.bfloat16)
        for r in T.Persistent([R], cores, core):
            T.copy(G[r, :], g)
            T.copy(U[r, :], u)
            T.copy(W[r : r + 1], w)
            with T.SimtVF(threads=threads):
                for i in T.Parallel(I):
                    gate = T.min(T.cast(g[i], "float32"), T.float32(limit))
                    up = T.max(T.min(T.cast(u[i], "float32"), T.float32(limit)), T.float32(-limit))
                    y[i] = T.cast(gate / (T.float32(1.0) + T.exp(-gate)) * up * w[0], "bfloat16")
            T.copy(y, Y[r, :])


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if weight is None:
        weight = torch.ones(gate.shape[0], dtype=torch.float32, device=gate.device)
    gated(gate.contiguous(), up.contiguous(), weight.contiguous(), out, limit=limit or 3.0e38)
    return out
