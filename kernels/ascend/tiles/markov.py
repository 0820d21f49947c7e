"""markov: what the previous token says about the next, its embedding times every row of the head, in float32."""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor

COLUMNS = 64  # of the vocabulary, a tile


@tilelang.jit(target="ascend")
def bias(X, W, Y, rows: int = 8, cores: int = 64, threads: int = 512):
    """X bf16 [R, D], W bf16 [V, D] -> Y float32 [R, V]; V a multiple of 64. A tile of the head is read once and meets
    all rows, ``rows`` at a time."""
    R = T.dynamic("R")
    V, D = T.const("V, D")
    X: T.Tensor((R, D), T.bfloat16)
    W: T.Tensor((V, D), T.bfloat16)
    Y: T.Tensor((R, V), T.float32)
    with T.Kernel(cores) as core:
        w = T.alloc_shared((COLUMNS, D), T.bfloat16)
        x = T.alloc_shared((rows, D), T.bfloat16)
        y = T.alloc_shared((rows, COLUMNS), T.float32)
        for v in T.Persistent([V // COLUMNS], cores, core):
            T.copy(W[v * COLUMNS : (v + 1) * COLUMNS, :], w)
            for t in T.serial(T.ceildiv(R, rows)):
                for i in T.serial(rows):
                    # The last tile repeats the last row.
                    T.copy(X[T.min(t * rows + i, R - 1), :], x[i, :])
                with T.SimtVF(threads=threads):
                    for i, c in T.Parallel(rows, COLUMNS):
                        total = T.alloc_var(T.float32)
                        total = T.float32(0.0)
                        for d in T.serial(D):
                            total = total + T.cast(x[i, d], "float32") * T.cast(w[c, d], "float32")
                        y[i, c] = total
                for i in T.serial(rows):
                    if t * rows + i < R:
                        T.copy(y[i, :], Y[t * rows + i, v * COLUMNS : (v + 1) * COLUMNS])


def prepare_dense(weight: Tensor) -> Tensor:
    return weight


def markov(prev: Tensor, embed: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """
    Raises:
        NotImplementedError: a vocabulary that is not whole tiles.
    """
    if head.shape[0] % COLUMNS:
        raise NotImplementedError(
            f"markov of ascend-tilelang takes a vocabulary of a multiple of {COLUMNS}, got {head.shape[0]}; force "
            "markov=ascend"
        )
    e = embed.index_select(0, prev)
    out = torch.empty(prev.shape[0], head.shape[0], dtype=torch.float32, device=prev.device)
    bias(e, head.contiguous(), out)
    return out, e
