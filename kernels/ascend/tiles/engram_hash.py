"""engram_hash: table rows of the 2- to 4-grams that end at each row; int64 arithmetic that wraps."""

from __future__ import annotations

import tilelang
import tilelang.ascend.language as T
import torch
from torch import Tensor


@tilelang.jit(target="ascend")
def hashed(C, position, fresh, slot, ngrams, mult, prime, offset, Y, pad: int = 0, cores: int = 64):
    """C int64 [R] token classes, ngrams int64 [slots, L], strided, mult int64 [4], prime, offset int64 [3 * heads]
    -> Y int64 [R, 3 * heads]."""
    R, N = T.dynamic("R, N")
    L, P = T.const("L, P")
    n0 = T.dynamic("n0", "int64")
    C: T.Tensor((R,), T.int64)
    position: T.Tensor((R,), T.int64)
    fresh: T.Tensor((R,), T.int64)
    slot: T.Tensor((R,), T.int64)
    ngrams: T.StridedTensor((N, L), (n0, 1), T.int64)
    mult: T.Tensor((4,), T.int64)
    prime: T.Tensor((P,), T.int64)
    offset: T.Tensor((P,), T.int64)
    Y: T.Tensor((R, P), T.int64)
    with T.Kernel(cores) as core:
        primes = T.alloc_shared((P,), T.int64)
        offsets = T.alloc_shared((P,), T.int64)
        grams = T.alloc_shared((4,), T.int64)
        y = T.alloc_shared((P,), T.int64)
        T.copy(prime, primes)
        T.copy(offset, offsets)
        for r in T.Persistent([R], cores, core):
            own = C[r]
            first = T.if_then_else(fresh[r] >= 1, C[T.max(r - 1, 0)], ngrams[slot[r], (position[r] + L - 1) % L])
            second = T.if_then_else(fresh[r] >= 2, C[T.max(r - 2, 0)], ngrams[slot[r], (position[r] + L - 2) % L])
            third = T.if_then_else(fresh[r] >= 3, C[T.max(r - 3, 0)], ngrams[slot[r], (position[r] + L - 3) % L])
            at = position[r]
            m0 = mult[0]
            m1 = mult[1]
            m2 = mult[2]
            m3 = mult[3]
            with T.SimtVF(threads=32):
                for _ in T.Parallel(1):
                    dead1 = T.alloc_var(T.int32)
                    dead2 = T.alloc_var(T.int32)
                    dead3 = T.alloc_var(T.int32)
                    rolling = T.alloc_var(T.int64)
                    dead1 = T.if_then_else((own < 0) | (at < 1) | (first < 0), 1, 0)
                    dead2 = T.if_then_else((dead1 != 0) | (at < 2) | (second < 0), 1, 0)
                    dead3 = T.if_then_else((dead2 != 0) | (at < 3) | (third < 0), 1, 0)
                    rolling = T.if_then_else(own < 0, T.int64(pad), own) * m0
                    rolling = T.bitwise_xor(rolling, T.if_then_else(dead1 != 0, T.int64(pad), first) * m1)
                    grams[0] = rolling
                    rolling = T.bitwise_xor(rolling, T.if_then_else(dead2 != 0, T.int64(pad), second) * m2)
                    grams[1] = rolling
                    rolling = T.bitwise_xor(rolling, T.if_then_else(dead3 != 0, T.int64(pad), third) * m3)
                    grams[2] = rolling
                for p in T.Parallel(P):
                    rest = T.alloc_var(T.int64)
                    rest = grams[p // (P // 3)] % primes[p]
                    y[p] = T.if_then_else(rest < 0, rest + primes[p], rest) + offsets[p]
            T.copy(y, Y[r, :])


def engram_hash(
    token_classes: Tensor,
    positions: Tensor,
    fresh: Tensor,
    row_slots: Tensor,
    ngrams: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_class: int,
) -> Tensor:
    """
    Raises:
        NotImplementedError: another number of look-backs than three.
    """
    if multipliers.shape[0] != 4:
        raise NotImplementedError("engram_hash of ascend-tilelang looks back three tokens; force engram_hash=ascend")
    out = torch.empty(token_classes.shape[0], offsets.shape[0], dtype=torch.int64, device=token_classes.device)
    hashed(
        token_classes, positions, fresh, row_slots, ngrams, multipliers, primes.flatten(), offsets, out, pad=pad_class
    )
    return out
