"""Arithmetic of the reference: float64 sums that do not depend on what else is in the batch.

A BLAS may add the terms of a dot product in another order when the number of rows changes, so a plain matrix product
is not bit-equal between one row and the same row in a batch. Here every operand of a product has a significand of at
most 8 bits (bf16, FP8 and FP4 values are such; float32 is split into three that add up to it), so a product has 16
bits and float64 holds a sum of thousands of them *exactly* while they lie within 25 binary orders of magnitude of
each other. Exact sums have no order.

Exponentials, logarithms, sines and cosines come only from torch functions that give an element the same result
wherever it lies in a tensor; sigmoid and softplus do not and are built from the exponential.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

CACHE_BYTES = 512 << 20  # float64 copies of weights kept between calls, whole process
SLAB_BYTES = 64 << 20  # float64 rows of a weight made per step when the cache is full
CHUNK_BYTES = 128 << 20  # largest temporary of an op; more rows run in several chunks

_cached_bytes = 0


def row_chunks(rows: int, bytes_per_row: int) -> Iterator[slice]:
    """Slices over rows that keep a temporary of ``bytes_per_row`` under CHUNK_BYTES; at least one, possibly empty."""
    step = max(1, CHUNK_BYTES // max(1, bytes_per_row))
    for start in range(0, max(1, rows), step):
        yield slice(start, min(rows, start + step))


def significands(x: Tensor) -> list[Tensor]:
    """float64 tensors with 8-bit significands that add up to x. A float64 x is trusted to be one already."""
    if x.dtype == torch.float64:
        return [x]
    if x.dtype == torch.bfloat16:
        return [x.to(torch.float64)]
    high = x.to(torch.bfloat16).to(torch.float32)
    rest = x - high
    middle = rest.to(torch.bfloat16).to(torch.float32)
    return [part.to(torch.float64) for part in (rest - middle, middle, high)]  # smallest first


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., T, K] times weight [..., N, K] transposed -> float64 [..., T, N]."""
    left, right = significands(x), significands(weight)
    if len(left) == len(right) == 1:
        return left[0] @ right[0].mT
    parts = torch.cat(left, -2) @ torch.cat(right, -2).mT
    total: Tensor | None = None
    for row in parts.chunk(len(left), -2):
        for part in row.chunk(len(right), -1):
            total = part if total is None else total + part
    assert total is not None
    return total


def tree_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Sum over a dimension in an order that depends on its size only."""
    while (width := x.shape[dim]) > 1:
        half = width // 2
        folded = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = folded if width % 2 == 0 else torch.cat((folded, x.narrow(dim, width - 1, 1)), dim)
    return x.squeeze(dim)


def square_mean(x: Tensor) -> Tensor:
    """Mean of squares over the last dimension, float64 [..., 1]."""
    wide = x.to(torch.float64)
    squares = wide * wide
    # Squares of bf16 have 16 bits: their sum is exact in any order.
    total = squares.sum(-1) if x.dtype == torch.bfloat16 else tree_sum(squares)
    return (total / x.shape[-1]).unsqueeze(-1)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


class Weight:
    """A weight [rows, columns] that is stored in a narrow format and multiplied in float64.

    ``load(slice)`` dequantises some rows. The first use keeps the float64 copy while the process-wide budget lasts; a
    weight that came too late is dequantised anew in slabs on every use. The budget returns when the weight is freed.
    """

    def __init__(self, rows: int, columns: int, load: Callable[[slice], Tensor]):
        self.rows, self.columns, self.load = rows, columns, load
        self.copy: Tensor | None = None

    def slabs(self) -> Iterator[Tensor]:
        """float64 rows, in order."""
        if self.copy is None and not self._keep():
            step = max(1, SLAB_BYTES // (self.columns * 8))
            for start in range(0, self.rows, step):
                yield self.load(slice(start, min(self.rows, start + step))).to(torch.float64)
        else:
            assert self.copy is not None
            yield self.copy

    def _keep(self) -> bool:
        global _cached_bytes
        size = self.rows * self.columns * 8
        if _cached_bytes + size > CACHE_BYTES:
            return False
        self.copy = self.load(slice(0, self.rows)).to(torch.float64)
        _cached_bytes += size
        weakref.finalize(self, _give_back, size)
        return True

    def refresh(self) -> None:
        """What ``load`` reads has changed."""
        if self.copy is not None:
            with torch.inference_mode():  # in which the copy may have been made
                self.copy.copy_(self.load(slice(0, self.rows)))

    def multiply(self, x: Tensor) -> Tensor:
        """x [T, columns] bf16, float32, or float64 with short significands -> float64 [T, rows]."""
        if x.dtype != torch.float32:
            x = x.to(torch.float64)
            if self.copy is not None:
                return F.linear(x, self.copy)
            return torch.cat([F.linear(x, slab) for slab in self.slabs()], -1)
        return torch.cat([product(x, slab) for slab in self.slabs()], -1)


def _give_back(size: int) -> None:
    global _cached_bytes
    _cached_bytes -= size
