"""window_write, tail_write and ngram_write: kept rows stored at a slot and a place of its ring.

A state pool is strided by the slot; ids times strides are int64 products. A row that is not kept is not looked at.
"""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor


@tilelang.jit(target="ascend")
def store(X, Y, slot, place, keep, cores: int = 64):
    """X uint8 [R, W] -> Y uint8 [slots, L, W], strided, at [slot, place] where keep is not 0."""
    R, N = T.dynamic("R, N")
    L, W = T.const("L, W")
    y0, y1 = T.dynamic("y0, y1", "int64")
    X: T.Tensor((R, W), T.uint8)
    Y: T.StridedTensor((N, L, W), (y0, y1, 1), T.uint8)
    slot: T.Tensor((R,), T.int64)
    place: T.Tensor((R,), T.int64)
    keep: T.Tensor((R,), T.int32)
    with T.Kernel(cores) as core:
        row = T.alloc_shared((W,), T.uint8)
        for r in T.Persistent([R], cores, core):
            if keep[r] != 0:
                T.copy(X[r, :], row)
                T.copy(row, Y[slot[r], place[r], :])


def _store(rows: Tensor, memory: Tensor, slots: Tensor, positions: Tensor, keep: Tensor) -> None:
    """rows [R, ...] into memory [slots, L, ...] of the same type, whose last dimensions are dense."""
    count, places = rows.shape[0], memory.shape[1]
    flat = memory.flatten(2) if memory.dim() > 2 else memory[..., None]
    store(
        rows.reshape(count, -1).contiguous().view(torch.uint8),
        flat.view(torch.uint8),
        slots,
        positions % places,
        keep.to(torch.int32),
    )


def window_write(
    packed: Tensor, row_slots: Tensor, positions: Tensor, keep: Tensor, ring: Tensor, tags: Tensor
) -> None:
    _store(packed, ring, row_slots, positions, keep)
    _store(positions.to(torch.int32)[:, None], tags, row_slots, positions, keep)


def tail_write(value: Tensor, score: Tensor, positions: Tensor, row_slots: Tensor, keep: Tensor, tail: Tensor) -> None:
    _store(torch.stack((value, score), 1), tail, row_slots, positions, keep)


def ngram_write(token_classes: Tensor, positions: Tensor, row_slots: Tensor, keep: Tensor, ngrams: Tensor) -> None:
    _store(token_classes[:, None], ngrams, row_slots, positions, keep)
