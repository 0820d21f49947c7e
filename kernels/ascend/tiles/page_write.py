"""latent_write and index_key_write: rows cast to FP4 and stored in their pages in one launch.

A page pool is strided by the page; ids times strides are int64 products. A row that is not kept is not looked at.
"""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor

from . import bits


@tilelang.jit(target="ascend")
def index_rows(X, V, S, page, group, keep, cores: int = 64, threads: int = 128):
    """X bf16 [R, D], D a multiple of 128 -> V int32 [pages, G, D/8], eight codes a word, S int32 [pages, G, D/128],
    four UE8M0 scales a word; both strided."""
    R, N = T.dynamic("R, N")
    D, G = T.const("D, G")
    v0, v1, s0, s1 = T.dynamic("v0, v1, s0, s1", "int64")
    X: T.Tensor((R, D), T.bfloat16)
    V: T.StridedTensor((N, G, D // 8), (v0, v1, 1), T.int32)
    S: T.StridedTensor((N, G, D // 128), (s0, s1, 1), T.int32)
    page: T.Tensor((R,), T.int64)
    group: T.Tensor((R,), T.int64)
    keep: T.Tensor((R,), T.int32)
    with T.Kernel(cores) as core:
        x = T.alloc_shared((D,), T.bfloat16)
        y = T.alloc_shared((D // 8,), T.int32)
        scale = T.alloc_shared((D // 32,), T.int32)
        packed = T.alloc_shared((D // 128,), T.int32)
        for r in T.Persistent([R], cores, core):
            if keep[r] != 0:
                T.copy(X[r, :], x)
                with T.SimtVF(threads=threads):
                    for b in T.Parallel(D // 32):
                        most = T.alloc_var(T.int32)
                        most = 0x01C00000  # 6 x 2^-126
                        for k in T.serial(32):
                            most = T.max(most, bits.as_int(bits.magnitude(T.cast(x[b * 32 + k], "float32"))))
                        scale[b] = bits.fp4_exponent(bits.as_float(most))
                    for w in T.Parallel(D // 8):
                        word = T.alloc_var(T.int32)
                        word = 0
                        for i in T.serial(8):
                            value = T.alloc_var(T.float32)
                            value = T.cast(x[w * 8 + i], "float32") * bits.inverse(scale[w // 4])
                            word = T.bitwise_or(word, T.shift_left(bits.e2m1(value), 4 * i))
                        y[w] = word
                    bits.bytes_to_words(scale, packed, 0, D // 128)
                T.copy(y, V[page[r], group[r], :])
                T.copy(packed, S[page[r], group[r], :])


@tilelang.jit(target="ascend")
def latent_rows(X, V, S, page, group, keep, cores: int = 64, threads: int = 128):
    """X bf16 [R, D], D a multiple of 64 -> V int32 [pages, G, D/8], S int32 [pages, G, D/64], four e4m3 scales a word;
    both strided."""
    R, N = T.dynamic("R, N")
    D, G = T.const("D, G")
    v0, v1, s0, s1 = T.dynamic("v0, v1, s0, s1", "int64")
    X: T.Tensor((R, D), T.bfloat16)
    V: T.StridedTensor((N, G, D // 8), (v0, v1, 1), T.int32)
    S: T.StridedTensor((N, G, D // 64), (s0, s1, 1), T.int32)
    page: T.Tensor((R,), T.int64)
    group: T.Tensor((R,), T.int64)
    keep: T.Tensor((R,), T.int32)
    with T.Kernel(cores) as core:
        x = T.alloc_shared((D,), T.bfloat16)
        y = T.alloc_shared((D // 8,), T.int32)
        scale = T.alloc_shared((D // 16,), T.int32)
        packed = T.alloc_shared((D // 64,), T.int32)
        for r in T.Persistent([R], cores, core):
            if keep[r] != 0:
                T.copy(X[r, :], x)
                with T.SimtVF(threads=threads):
                    for b in T.Parallel(D // 16):
                        most = T.alloc_var(T.int32)
                        ratio = T.alloc_var(T.float32)
                        most = 0x3C400000  # 6 x 2^-9
                        for k in T.serial(16):
                            most = T.max(most, bits.as_int(bits.magnitude(T.cast(x[b * 16 + k], "float32"))))
                        ratio = T.min(bits.as_float(T.min(most, 0x7F7FFFFF)), T.float32(2688.0)) / T.float32(6.0)
                        scale[b] = T.if_then_else(most >= 0x7F800000, 127, bits.e4m3(ratio))
                    for w in T.Parallel(D // 8):
                        word = T.alloc_var(T.int32)
                        word = 0
                        for i in T.serial(8):
                            value = T.alloc_var(T.float32)
                            value = T.cast(x[w * 8 + i], "float32") / bits.e4m3_value(scale[w // 2])
                            word = T.bitwise_or(word, T.shift_left(bits.e2m1(value), 4 * i))
                        y[w] = word
                    bits.bytes_to_words(scale, packed, 0, D // 64)
                T.copy(y, V[page[r], group[r], :])
                T.copy(packed, S[page[r], group[r], :])


def latent_write(
    latent: Tensor, values: Tensor, scales: Tensor, page_ids: Tensor, groups: Tensor, keep: Tensor
) -> None:
    latent_rows(
        latent.contiguous(), values.view(torch.int32), scales.view(torch.int32), page_ids, groups, keep.to(torch.int32)
    )


def index_key_write(
    key: Tensor, values: Tensor, scales: Tensor, page_ids: Tensor, groups: Tensor, keep: Tensor
) -> None:
    index_rows(
        key.contiguous(), values.view(torch.int32), scales.view(torch.int32), page_ids, groups, keep.to(torch.int32)
    )
