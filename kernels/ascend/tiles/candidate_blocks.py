"""candidate_blocks: the best blocks of consecutive groups of a row, the last reachable one always among them; ties to
the lower block. Selected as ``top_groups`` selects, with a block's best score for its key."""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor

from . import select
from .select import LANES, MOST


@tilelang.jit(target="ascend")
def kept(S, V, Y, block: int = 8, blocks: int = 2048, cores: int = 64):
    """S bf16 [R, G], V int32 [R] reachable groups -> Y int32 [R, G/4], a byte a group, 1 for those of kept blocks. G a
    multiple of as many blocks as there are lanes; ``block`` a multiple of 4."""
    R = T.dynamic("R")
    G = T.const("G")
    S: T.Tensor((R, G), T.bfloat16)
    V: T.Tensor((R,), T.int32)
    Y: T.Tensor((R, G // 4), T.int32)
    with T.Kernel(cores) as core:
        s = T.alloc_shared((LANES * block,), T.bfloat16)
        keys = T.alloc_shared((G // block,), T.int16)
        count = T.alloc_shared((LANES,), T.int32)
        equal = T.alloc_shared((LANES,), T.int32)
        part = T.alloc_shared((32,), T.int32)
        bound = T.alloc_shared((8,), T.int32)
        tighter = T.alloc_shared((8,), T.int32)
        start = T.alloc_shared((LANES,), T.int32)
        quota = T.alloc_shared((LANES,), T.int32)
        y = T.alloc_shared((LANES * block // 4,), T.int32)
        for r in T.Persistent([R], cores, core):
            visible = T.max(T.min(V[r], G), 0)
            reachable = T.ceildiv(visible, block)
            wanted = T.min(reachable, blocks)
            for at in T.serial(G // (LANES * block)):
                T.copy(S[r, at * LANES * block : (at + 1) * LANES * block], s)
                with T.SimtVF(threads=LANES):
                    for b in T.Parallel(LANES):
                        top = T.alloc_var(T.int32)
                        top = select.UNREACHABLE
                        for i in T.serial(block):
                            key = select.key(s[b * block + i])
                            hidden = (at * LANES + b) * block + i >= visible
                            top = T.max(top, T.if_then_else(hidden, select.UNREACHABLE, key))
                        top = T.if_then_else(at * LANES + b == reachable - 1, select.LAST, top)
                        keys[at * LANES + b] = T.cast(top, "int16")
            with T.SimtVF(threads=LANES):
                select.threshold(keys, G // block, wanted, bound, tighter, count, part)
                select.runs(keys, G // block, wanted, bound, count, equal, start, quota)
                # Every lane turns the keys of its run into yes and no.
                for n in T.Parallel(LANES):
                    ties = T.alloc_var(T.int32)
                    ties = 0
                    for m in T.serial(G // block // LANES):
                        key = T.cast(keys[n * (G // block // LANES) + m], "int32")
                        tie = T.if_then_else((key == bound[0]) & (ties < quota[n]), 1, 0)
                        taken = T.if_then_else(key > bound[0], 1, tie)
                        ties = ties + tie
                        keys[n * (G // block // LANES) + m] = T.cast(taken, "int16")
            for at in T.serial(G // (LANES * block)):
                with T.SimtVF(threads=LANES):
                    for w in T.Parallel(LANES * block // 4):
                        word = T.alloc_var(T.int32)
                        word = 0
                        for i in T.serial(4):
                            group = at * LANES * block + w * 4 + i
                            taken = T.cast(keys[at * LANES + w * 4 // block], "int32")
                            word = T.bitwise_or(word, T.shift_left(T.if_then_else(group < visible, taken, 0), 8 * i))
                        y[w] = word
                T.copy(y, Y[r, at * (LANES * block // 4) : (at + 1) * (LANES * block // 4)])


def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, blocks: int) -> Tensor:
    """
    Raises:
        NotImplementedError: blocks that do not fill words, or more than whose keys fit the unified buffer.
    """
    rows, groups = scores.shape
    if block_size not in (4, 8, 16, 32) or groups > MOST * block_size:
        raise NotImplementedError(
            f"candidate_blocks of ascend-tilelang keeps blocks of 4, 8, 16 or 32 groups, at most {MOST} of them, got "
            f"{groups} groups in blocks of {block_size}; force candidate_blocks=ascend"
        )
    # Few widths, so few kernels: powers of two. What is added is beyond what is reachable.
    width = max(LANES * block_size, 1 << (groups - 1).bit_length())
    out = torch.empty(rows, width // 4, dtype=torch.int32, device=scores.device)
    padded = torch.nn.functional.pad(scores, (0, width - groups))
    kept(padded, visible.clamp(max=groups).to(torch.int32), out, block=block_size, blocks=blocks)
    return out.view(torch.uint8)[:, :groups].contiguous().view(torch.bool)
