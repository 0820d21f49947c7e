"""window_pack: a row in e4m3 with a UE8M0 scale per 32 channels, values then scales."""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor

from . import bits


@tilelang.jit(target="ascend")
def pack(X, Y, cores: int = 64, threads: int = 128):
    """X bf16 [R, D], D a multiple of 128 -> Y int32 [R, (D + D/32) / 4], the bytes of values and scales."""
    R = T.dynamic("R")
    D = T.const("D")
    X: T.Tensor((R, D), T.bfloat16)
    Y: T.Tensor((R, (D + D // 32) // 4), T.int32)
    with T.Kernel(cores) as core:
        x = T.alloc_shared((D,), T.bfloat16)
        y = T.alloc_shared(((D + D // 32) // 4,), T.int32)
        scale = T.alloc_shared((D // 32,), T.int32)
        for r in T.Persistent([R], cores, core):
            T.copy(X[r, :], x)
            with T.SimtVF(threads=threads):
                for b in T.Parallel(D // 32):
                    most = T.alloc_var(T.int32)
                    most = 0x38D1B717  # 1e-4; magnitudes compare as integers, a NaN above all
                    for k in T.serial(32):
                        most = T.max(most, bits.as_int(bits.magnitude(T.cast(x[b * 32 + k], "float32"))))
                    scale[b] = bits.fp8_exponent(bits.as_float(most))
                for w in T.Parallel(D // 4):
                    word = T.alloc_var(T.int32)
                    word = 0
                    for i in T.serial(4):
                        value = T.alloc_var(T.float32)
                        value = T.cast(x[w * 4 + i], "float32") * bits.inverse(scale[w // 8])
                        word = T.bitwise_or(word, T.shift_left(bits.e4m3(value), 8 * i))
                    y[w] = word
                bits.bytes_to_words(scale, y, D // 4, D // 128)
            T.copy(y, Y[r, :])


def window_pack(kv: Tensor) -> Tensor:
    rows, size = kv.shape
    out = torch.empty(rows, size + size // 32, dtype=torch.uint8, device=kv.device)
    pack(kv.contiguous(), out.view(torch.int32))
    return out
