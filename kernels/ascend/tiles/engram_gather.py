"""engram_gather: rows of the hash table, FP8 with a UE8M0 scale per 32 channels, as bf16."""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor

from . import bits


@tilelang.jit(target="ascend")
def gather(table, scale, ids, Y, cores: int = 64, threads: int = 128):
    """table int32 [N, D/4] and scale uint8 [N, D/32], bytes of e4m3 and UE8M0; ids int64 [P] -> Y bf16 [P, D]."""
    P, N = T.dynamic("P, N")
    D = T.const("D")
    table: T.Tensor((N, D // 4), T.int32)
    scale: T.Tensor((N, D // 32), T.uint8)
    ids: T.Tensor((P,), T.int64)
    Y: T.Tensor((P, D), T.bfloat16)
    with T.Kernel(cores) as core:
        x = T.alloc_shared((D // 4,), T.int32)
        s = T.alloc_shared((D // 32,), T.uint8)
        y = T.alloc_shared((D,), T.bfloat16)
        for p in T.Persistent([P], cores, core):
            T.copy(table[ids[p], :], x)
            T.copy(scale[ids[p], :], s)
            with T.SimtVF(threads=threads):
                for d in T.Parallel(D):
                    byte = T.alloc_var(T.int32)
                    byte = T.bitwise_and(T.shift_right(x[d // 4], (d % 4) * 8), 255)
                    factor = bits.e8m0_value(T.cast(s[d // 32], "int32"))
                    y[d] = T.cast(bits.e4m3_value(byte) * factor, "bfloat16")
            T.copy(y, Y[p, :])


def engram_gather(rows: Tensor, table: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    count, columns, size = rows.shape[0], rows.shape[1], table.shape[1]
    out = torch.empty(count, columns * size, dtype=torch.bfloat16, device=rows.device)
    gather(table.view(torch.int32), scale.view(torch.uint8), rows.flatten(), out.view(-1, size))
    return out
