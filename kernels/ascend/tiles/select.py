"""The k largest of a row of 16-bit keys: what the kernels that select have in common."""

from __future__ import annotations

from typing import Any

import tilelang.ascend.language as T

from . import bits

LANES = 256
MOST = 65536  # keys of a row, which fit the unified buffer
UNREACHABLE, OTHER, LOWEST = -32768, -32767, -32766  # below every score; other: not a candidate
LAST = 32767  # above every score

Expr = Any  # an expression of the kernel under construction


def key(score: Expr) -> Expr:
    """int32 key of a bf16 score, in the contract's order: both zeros are one, NaN and minus infinity the lowest."""
    code = bits.as_int(T.cast(score, "float32"))
    size = T.bitwise_and(code, 0x7FFFFFFF)
    high = T.shift_right(code, 16)
    ordered = T.if_then_else(code < 0, T.bitwise_xor(high, 0x7FFF), high)
    lowest = (size > 0x7F800000) | ((size == 0x7F800000) & (code < 0))
    return T.if_then_else(size == 0, 0, T.if_then_else(lowest, LOWEST, ordered))


@T.macro
def threshold(keys, groups, wanted, bound, tighter, count, part):
    """bound[0]: the largest number that ``wanted`` of ``keys`` [groups] reach, by bisection. Lanes meet at barriers."""
    for i in T.Parallel(8):
        bound[i] = T.if_then_else(i == 0, -32768, 32768)
    for _turn in T.serial(16):
        for n in T.Parallel(LANES):
            total = T.alloc_var(T.int32)
            middle = T.shift_right(bound[0] + bound[1], 1)
            total = 0
            for m in T.serial(groups // LANES):
                total = total + T.if_then_else(T.cast(keys[m * LANES + n], "int32") >= middle, 1, 0)
            count[n] = total
        for n in T.Parallel(32):
            total = T.alloc_var(T.int32)
            total = 0
            for m in T.serial(LANES // 32):
                total = total + count[n * (LANES // 32) + m]
            part[n] = total
        for i in T.Parallel(8):
            total = T.alloc_var(T.int32)
            low = T.alloc_var(T.int32)
            high = T.alloc_var(T.int32)
            middle = T.shift_right(bound[0] + bound[1], 1)
            total = 0
            for m in T.serial(32):
                total = total + part[m]
            low = T.if_then_else(total >= wanted, middle, bound[0])
            high = T.if_then_else(total >= wanted, bound[1], middle)
            tighter[i] = T.if_then_else(i == 0, low, high)
        for i in T.Parallel(8):
            bound[i] = tighter[i]


@T.macro
def runs(keys, groups, wanted, bound, count, equal, start, quota):
    """Lanes own runs of consecutive keys. start: selected keys before a run, quota: keys of a run that are selected
    though they only reach bound[0], [LANES] each; ties go to the lower number."""
    for n in T.Parallel(LANES):
        total = T.alloc_var(T.int32)
        ties = T.alloc_var(T.int32)
        total = 0
        ties = 0
        for m in T.serial(groups // LANES):
            found = T.cast(keys[n * (groups // LANES) + m], "int32")
            total = total + T.if_then_else(found > bound[0], 1, 0)
            ties = ties + T.if_then_else(found == bound[0], 1, 0)
        count[n] = total
        equal[n] = ties
    for _ in T.Parallel(1):
        before = T.alloc_var(T.int32)
        left = T.alloc_var(T.int32)
        before = 0
        left = wanted
        for n in T.serial(LANES):
            left = left - count[n]
        for n in T.serial(LANES):
            start[n] = before
            quota[n] = T.min(equal[n], left)
            before = before + count[n] + T.min(equal[n], left)
            left = left - T.min(equal[n], left)
