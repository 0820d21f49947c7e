"""engram_gate: the fetched value added to each stream of a row as far as the stream agrees with its key."""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor


@tilelang.jit(target="ascend")
def gated_streams(S, V, Q, K, live, Y, eps: float = 1e-20, cores: int = 64, threads: int = 256):
    """S bf16 [R, M, H], V bf16 [R, M + 1, H] (keys, then a value), Q, K bf16 [M, H], live int32 [R] -> Y bf16
    [R, M, H]. H a multiple of 32."""
    R = T.dynamic("R")
    M, H = T.const("M, H")
    S: T.Tensor((R, M, H), T.bfloat16)
    V: T.Tensor((R, M + 1, H), T.bfloat16)
    Q: T.Tensor((M, H), T.bfloat16)
    K: T.Tensor((M, H), T.bfloat16)
    live: T.Tensor((R,), T.int32)
    Y: T.Tensor((R, M, H), T.bfloat16)
    with T.Kernel(cores) as core:
        q = T.alloc_shared((M, H), T.bfloat16)
        k = T.alloc_shared((M, H), T.bfloat16)
        s = T.alloc_shared((M, H), T.bfloat16)
        v = T.alloc_shared((M + 1, H), T.bfloat16)
        dots = T.alloc_shared((M, H // 32), T.float32)
        squares = T.alloc_shared((M, H // 32), T.float32)
        keys = T.alloc_shared((M, H // 32), T.float32)
        gate = T.alloc_shared((M,), T.float32)
        T.copy(Q, q)
        T.copy(K, k)
        for r in T.Persistent([R], cores, core):
            T.copy(S[r, :, :], s)
            T.copy(V[r, :, :], v)
            moves = live[r]
            with T.SimtVF(threads=threads):
                for m, i in T.Parallel(M, H // 32):
                    dot = T.alloc_var(T.float32)
                    square = T.alloc_var(T.float32)
                    key = T.alloc_var(T.float32)
                    dot = T.float32(0.0)
                    square = T.float32(0.0)
                    key = T.float32(0.0)
                    for c in T.serial(32):
                        x = T.cast(s[m, i * 32 + c], "float32")
                        y = T.cast(v[m, i * 32 + c], "float32")
                        weight = T.cast(q[m, i * 32 + c], "float32") * T.cast(k[m, i * 32 + c], "float32")
                        dot = dot + x * weight * y
                        square = square + x * x
                        key = key + y * y
                    dots[m, i] = dot
                    squares[m, i] = square
                    keys[m, i] = key
                for m in T.Parallel(M):
                    dot = T.alloc_var(T.float32)
                    square = T.alloc_var(T.float32)
                    key = T.alloc_var(T.float32)
                    root = T.alloc_var(T.float32)
                    dot = T.float32(0.0)
                    square = T.float32(0.0)
                    key = T.float32(0.0)
                    for i in T.serial(H // 32):
                        dot = dot + dots[m, i]
                        square = square + squares[m, i]
                        key = key + keys[m, i]
                    square = T.sqrt(square / T.float32(H) + T.float32(eps))
                    key = T.sqrt(key / T.float32(H) + T.float32(eps))
                    dot = dot / square / key * T.float32(H**-0.5)
                    root = T.sqrt(T.max(T.abs(dot), T.float32(1e-6)))
                    root = T.if_then_else(dot < T.float32(0.0), -root, root)
                    gate[m] = T.float32(1.0) / (T.float32(1.0) + T.exp(-root))
                for m, h in T.Parallel(M, H):
                    moved = T.cast(s[m, h], "float32") + gate[m] * T.cast(v[M, h], "float32")
                    s[m, h] = T.if_then_else(moves != 0, T.cast(moved, "bfloat16"), s[m, h])
            T.copy(s, Y[r, :, :])


def engram_gate(streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, live: Tensor) -> Tensor:
    rows, m, h = streams.shape
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    keys = kv.contiguous().view(rows, m + 1, h)
    weights = q_weight.contiguous(), k_weight.contiguous()
    gated_streams(streams.contiguous(), keys, *weights, live.to(torch.int32), out, eps=eps)
    return out
