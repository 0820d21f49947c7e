"""index_scores on the cube: a page of keys, widened on the vector units, times the heads of a row's query; then the
weighted sum over heads on the vector units again. Operands are narrow formats that bf16 holds exactly."""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor

from .. import formats
from . import bits


@tilelang.jit(target="ascend")
def page_scores(Q, W, K, S, table, request, visible, Y, low: bool = True, cores: int = 32, threads: int = 256):
    """Q bf16 [R, H, D], W bf16 [R, H], K int32 [pages, G, D/8] e2m1 codes, S int32 [pages, G/8, D/16] UE8M0 bytes, four
    a word, K and S strided by page, table int64 [B, P], request int64 [R], visible int32 [R] -> Y bf16
    [R, P * G/16, 16], written as far as a row's reachable pages go. D = 128, G and H multiples of 32.

    Groups of a page are divided between the two vector units of a core; a unit has all heads of its groups.
    """
    R, N, B, P = T.dynamic("R, N, B, P")
    H, D, G = T.const("H, D, G")
    k0, s0 = T.dynamic("k0, s0", "int64")
    Q: T.Tensor((R, H, D), T.bfloat16)
    W: T.Tensor((R, H), T.bfloat16)
    K: T.StridedTensor((N, G, D // 8), (k0, D // 8, 1), T.int32)
    S: T.StridedTensor((N, G // 8, D // 16), (s0, D // 16, 1), T.int32)
    table: T.Tensor((B, P), T.int64)
    request: T.Tensor((R,), T.int64)
    visible: T.Tensor((R,), T.int32)
    Y: T.Tensor((R, P * (G // 16), 16), T.bfloat16)
    with T.Kernel(cores) as core:
        query = T.alloc_l1((H, D), T.bfloat16)
        keys = T.alloc_l1((G, D), T.bfloat16)
        product = T.alloc_l0c((G, H), T.float32)
        w = T.alloc_shared((H,), T.bfloat16)
        packed = T.alloc_shared((G // 2, D // 8), T.int32)
        scale = T.alloc_shared((G // 16, D // 16), T.int32)
        wide = T.alloc_shared((G // 2, D), T.bfloat16)
        dot = T.alloc_shared((G // 2, H), T.float32)
        y = T.alloc_shared((G // 32, 16), T.bfloat16)
        for r in T.Persistent([R], cores, core):
            T.copy(Q[r, :, :], query)
            T.copy(W[r, :], w)
            for p in T.serial(T.ceildiv(visible[r], G)):
                page = table[request[r], p]
                T.dual_copy(K[page, :, :], packed)
                T.dual_copy(S[page, :, :], scale)
                with T.SimtVF(threads=threads):
                    for g, c in T.Parallel(G // 2, D // 8):
                        word = T.alloc_var(T.int32)
                        factor = T.alloc_var(T.float32)
                        word = packed[g, c]
                        # Eight channels a word, 32 a scale, four scales a group.
                        byte = T.bitwise_and(T.shift_right(scale[g // 8, g % 8], 8 * (c // 4)), 255)
                        factor = bits.e8m0_value(byte)
                        for i in T.serial(8):
                            code = T.bitwise_and(T.shift_right(word, 4 * i), 15)
                            wide[g, c * 8 + i] = T.cast(bits.e2m1_value(code) * factor, "bfloat16")
                T.dual_copy(wide, keys)
                T.gemm(keys, query, product, transpose_B=True, clear_accum=True)
                T.dual_copy(product, dot)
                with T.SimtVF(threads=threads):
                    for g in T.Parallel(G // 2):
                        total = T.alloc_var(T.float32)
                        term = T.alloc_var(T.float32)
                        total = T.float32(0.0)
                        for h in T.serial(H):
                            term = dot[g, h]
                            if low:
                                term = T.cast(T.cast(term, "bfloat16"), "float32")
                            # Not a maximum: a NaN stays.
                            term = T.if_then_else(term < T.float32(0.0), T.float32(0.0), term)
                            term = term * T.cast(w[h], "float32")
                            if low:
                                term = T.cast(T.cast(term, "bfloat16"), "float32")
                            total = total + term
                        y[g // 16, g % 16] = T.cast(total, "bfloat16")
                T.dual_copy(y, Y[r, p * (G // 16) : (p + 1) * (G // 16), :])


def index_scores(
    query: Tensor,
    weight: Tensor,
    key: Tensor,
    key_scale: Tensor,
    page_table: Tensor,
    requests: Tensor,
    visible: Tensor,
    low_precision: bool,
) -> Tensor:
    """
    Raises:
        NotImplementedError: other heads, channels or groups of a page than the kernel has tiles for.
    """
    rows, heads, size = query.shape
    groups = key.shape[1]
    dense = key.stride()[1:] == (size // 2, 1) and key_scale.stride()[1:] == (size // 32, 1)
    if size != 128 or heads % 32 or groups not in (32, 64, 128) or not dense:
        raise NotImplementedError(
            "index_scores of ascend-tilelang takes heads in multiples of 32, 128 channels and dense sections of 32, 64 "
            f"or 128 groups, got {heads}, {size} and {groups}; force index_scores=ascend"
        )
    pages = page_table.shape[1]
    exact = formats.index_dequant(*formats.index_cast(query)).to(torch.bfloat16)
    out = torch.empty(rows, pages * groups // 16, 16, dtype=torch.bfloat16, device=query.device)
    page_scores(
        exact,
        weight.contiguous(),
        key.view(torch.int32),
        key_scale.view(torch.int32).unflatten(1, (groups // 8, 8)).flatten(2),
        page_table.clamp(0, key.shape[0] - 1),
        requests,
        visible.clamp(max=pages * groups).to(torch.int32),
        out,
        low=low_precision,
    )
    hidden = torch.arange(pages * groups, device=query.device) >= visible[:, None]
    return out.flatten(1).masked_fill(hidden, -torch.inf)
