"""hc_mix: the mixing weights of a site, by products with every channel of every stream and Sinkhorn rounds."""

from __future__ import annotations

from math import gcd

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor

WIDTH = 640  # channels of a tile: 70 KiB for 24 rows of weights and 8 of streams, a third of the unified buffer


@tilelang.jit(target="ascend")
def mixed(
    S,
    F,
    base,
    scale,
    Y,
    norm_eps: float = 1e-20,
    hc_eps: float = 1e-6,
    iters: int = 20,
    width: int = WIDTH,
    rows: int = 8,
    cores: int = 64,
    threads: int = 256,
):
    """S bf16 [R, K], all streams of a row, F float32 [N, K], base float32 [N], scale float32 [8], three of them used
    -> Y float32 [R, N]: pre, post, comb. N = 24, four streams. K a multiple of ``width``, that of 32."""
    R = T.dynamic("R")
    N, K = T.const("N, K")
    S: T.Tensor((R, K), T.bfloat16)
    F: T.Tensor((N, K), T.float32)
    base: T.Tensor((N,), T.float32)
    scale: T.Tensor((8,), T.float32)
    Y: T.Tensor((R, N), T.float32)
    with T.Kernel(cores) as core:
        f = T.alloc_shared((N, width), T.float32)
        s = T.alloc_shared((rows, width), T.bfloat16)
        part = T.alloc_shared((rows * N * 4,), T.float32)
        square = T.alloc_shared((rows * 32,), T.float32)
        b = T.alloc_shared((N,), T.float32)
        factor = T.alloc_shared((8,), T.float32)
        y = T.alloc_shared((rows * N,), T.float32)
        T.copy(base, b)
        T.copy(scale, factor)
        for t in T.Persistent([T.ceildiv(R, rows)], cores, core):
            with T.SimtVF(threads=threads):
                for n in T.Parallel(rows * N * 4):
                    part[n] = T.float32(0.0)
                for n in T.Parallel(rows * 32):
                    square[n] = T.float32(0.0)
            for c in T.serial(K // width):
                T.copy(F[:, c * width : (c + 1) * width], f)
                for i in T.serial(rows):
                    # The last tile repeats the last row.
                    T.copy(S[T.min(t * rows + i, R - 1), c * width : (c + 1) * width], s[i, :])
                with T.SimtVF(threads=threads):
                    for n in T.Parallel(rows * N * 4):
                        total = T.alloc_var(T.float32)
                        total = part[n]
                        for k in T.serial(width // 4):
                            x = T.cast(s[n // (N * 4), k * 4 + n % 4], "float32")
                            total = total + x * f[n // 4 % N, k * 4 + n % 4]
                        part[n] = total
                    for n in T.Parallel(rows * 32):
                        total = T.alloc_var(T.float32)
                        total = square[n]
                        for k in T.serial(width // 32):
                            x = T.cast(s[n // 32, k * 32 + n % 32], "float32")
                            total = total + x * x
                        square[n] = total
            with T.SimtVF(threads=threads):
                for i in T.Parallel(rows):
                    total = T.alloc_var(T.float32)
                    total = T.float32(0.0)
                    for k in T.serial(32):
                        total = total + square[i * 32 + k]
                    square[i * 32] = T.float32(1.0) / T.sqrt(total / T.float32(K) + T.float32(norm_eps))
                for n in T.Parallel(rows * N):
                    total = T.alloc_var(T.float32)
                    total = (part[n * 4] + part[n * 4 + 1]) + (part[n * 4 + 2] + part[n * 4 + 3])
                    total = total * square[n // N * 32] * factor[T.min(n % N // 4, 2)] + b[n % N]
                    gate = T.float32(1.0) / (T.float32(1.0) + T.exp(-total))
                    pre = gate + T.float32(hc_eps)
                    post = gate * T.float32(2.0)
                    y[n] = T.if_then_else(n % N < 4, pre, T.if_then_else(n % N < 8, post, total))
                for i in T.Parallel(rows):
                    comb = T.alloc_local((16,), T.float32)
                    top = T.alloc_var(T.float32)
                    total = T.alloc_var(T.float32)
                    for j in T.serial(4):
                        top = y[i * N + 8 + j * 4]
                        for k in T.serial(1, 4):
                            top = T.max(top, y[i * N + 8 + j * 4 + k])
                        total = T.float32(0.0)
                        for k in T.serial(4):
                            comb[j * 4 + k] = T.exp(y[i * N + 8 + j * 4 + k] - top)
                            total = total + comb[j * 4 + k]
                        for k in T.serial(4):
                            comb[j * 4 + k] = comb[j * 4 + k] / total + T.float32(hc_eps)
                    for turn in T.serial(iters):
                        if turn > 0:
                            for j in T.serial(4):  # over targets
                                total = T.float32(hc_eps)
                                for k in T.serial(4):
                                    total = total + comb[j * 4 + k]
                                for k in T.serial(4):
                                    comb[j * 4 + k] = comb[j * 4 + k] / total
                        for k in T.serial(4):  # over sources
                            total = T.float32(hc_eps)
                            for j in T.serial(4):
                                total = total + comb[j * 4 + k]
                            for j in T.serial(4):
                                comb[j * 4 + k] = comb[j * 4 + k] / total
                    for c in T.serial(16):
                        y[i * N + 8 + c] = comb[c]
            for i in T.serial(rows):
                if t * rows + i < R:
                    T.copy(y[i * N : (i + 1) * N], Y[t * rows + i, :])


def hc_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Raises:
        NotImplementedError: another number of streams than four, or channels that are no multiple of 8.
    """
    rows, m, size = streams.shape
    if m != 4 or size % 8:
        raise NotImplementedError(
            f"hc_mix of ascend-tilelang mixes four streams of a multiple of 8 channels, got {m} of {size}; force "
            "hc_mix=ascend"
        )
    out = torch.empty(rows, 24, dtype=torch.float32, device=streams.device)
    factors = torch.nn.functional.pad(scale, (0, 5))
    mixed(
        streams.reshape(rows, m * size).contiguous(),
        fn.contiguous(),
        base.contiguous(),
        factors,
        out,
        norm_eps=norm_eps,
        hc_eps=hc_eps,
        iters=iters,
        width=gcd(m * size, WIDTH),
    )
    return out[:, :4].contiguous(), out[:, 4:8].contiguous(), out[:, 8:].reshape(rows, 4, 4)
