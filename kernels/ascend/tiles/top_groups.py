"""top_groups: the k best groups of a row, ascending; ties to the lower id.

Scores become 16-bit keys in the order of the contract; the k-th largest is found by bisection, sixteen counts. Then
each place of the result looks for its group: no lane writes where another might, so nothing depends on their order.
"""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor

from . import select
from .select import LANES, MOST


@tilelang.jit(target="ascend")
def best(S, V, C, Y, k: int = 512, chunk: int = 1024, cores: int = 64):
    """S bf16 [R, G], V int32 [R] reachable groups, C uint8 [R, G] candidates -> Y int64 [R, K]: the ``k`` best, -1.
    G a multiple of ``chunk``, K of the lanes: all of them meet at barriers."""
    R = T.dynamic("R")
    G, K = T.const("G, K")
    S: T.Tensor((R, G), T.bfloat16)
    V: T.Tensor((R,), T.int32)
    C: T.Tensor((R, G), T.uint8)
    Y: T.Tensor((R, K), T.int64)
    with T.Kernel(cores) as core:
        s = T.alloc_shared((chunk,), T.bfloat16)
        c = T.alloc_shared((chunk,), T.uint8)
        keys = T.alloc_shared((G,), T.int16)
        count = T.alloc_shared((LANES,), T.int32)
        equal = T.alloc_shared((LANES,), T.int32)
        part = T.alloc_shared((32,), T.int32)
        bound = T.alloc_shared((8,), T.int32)  # lowest and highest candidate of the threshold
        tighter = T.alloc_shared((8,), T.int32)
        start = T.alloc_shared((LANES,), T.int32)
        quota = T.alloc_shared((LANES,), T.int32)
        y = T.alloc_shared((K,), T.int64)
        for r in T.Persistent([R], cores, core):
            visible = T.max(T.min(V[r], G), 0)
            wanted = T.min(visible, k)
            for at in T.serial(G // chunk):
                T.copy(S[r, at * chunk : (at + 1) * chunk], s)
                T.copy(C[r, at * chunk : (at + 1) * chunk], c)
                with T.SimtVF(threads=LANES):
                    for g in T.Parallel(chunk):
                        key = T.alloc_var(T.int32)
                        key = T.if_then_else(c[g] == 0, select.OTHER, select.key(s[g]))
                        key = T.if_then_else(at * chunk + g < visible, key, select.UNREACHABLE)
                        keys[at * chunk + g] = T.cast(key, "int16")
            with T.SimtVF(threads=LANES):
                select.threshold(keys, G, wanted, bound, tighter, count, part)
                select.runs(keys, G, wanted, bound, count, equal, start, quota)
                for j in T.Parallel(K):
                    run = T.alloc_var(T.int32)
                    seen = T.alloc_var(T.int32)
                    ties = T.alloc_var(T.int32)
                    found = T.alloc_var(T.int32)
                    run = 0
                    for n in T.serial(8):  # the last run that begins here or before
                        step = T.shift_right(LANES // 2, n)
                        run = T.if_then_else(start[run + step] <= j, run + step, run)
                    seen = start[run]
                    ties = 0
                    found = -1
                    for m in T.serial(G // LANES):
                        at = run * (G // LANES) + m
                        key = T.cast(keys[at], "int32")
                        tie = T.if_then_else((key == bound[0]) & (ties < quota[run]), 1, 0)
                        taken = T.if_then_else(key > bound[0], 1, tie)
                        found = T.if_then_else((taken > 0) & (seen == j), at, found)
                        seen = seen + taken
                        ties = ties + tie
                    y[j] = T.cast(T.if_then_else(j < wanted, found, -1), "int64")
            T.copy(y, Y[r, :])


def top_groups(scores: Tensor, visible: Tensor, k: int, candidates: Tensor | None) -> Tensor:
    """
    Raises:
        NotImplementedError: more groups than keys fit the unified buffer.
    """
    rows, groups = scores.shape
    if groups > MOST:
        raise NotImplementedError(
            f"top_groups of ascend-tilelang ranks at most {MOST} groups, got {groups}; force top_groups=ascend"
        )
    # Few widths, so few kernels: powers of two. What is added is beyond what is reachable.
    width = max(1024, 1 << (groups - 1).bit_length())
    if candidates is None:
        candidates = torch.ones_like(scores, dtype=torch.bool)
    padding = (0, width - groups)
    out = torch.empty(rows, -(-k // LANES) * LANES, dtype=torch.int64, device=scores.device)
    best(
        torch.nn.functional.pad(scores, padding),
        visible.clamp(max=groups).to(torch.int32),
        torch.nn.functional.pad(candidates.view(torch.uint8), padding),
        out,
        k=k,
    )
    return out[:, :k].contiguous()
