"""Which slot computes which row's expert, where an expert lies in several: the reference's integers, to the bit.

Three launches. ``_count``: the rows of each expert in every block of pairs. ``_divide``, one program: rounds of
weights in registers, experts down and ranks across, then where each rank's rows of an expert end. ``_assign``: a pair
is the n-th of its expert, counted from the blocks before its own and the pairs before it there; n decides the rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import split as definition
from .overlap import OVERLAP, after_previous

PAIRS = 256  # of a row and an expert, in a block
AT_ONCE = 16  # blocks read at a time
CHUNK = 64  # experts whose rows are brought to their ranks at a time
BITS = tl.constexpr(definition.BITS)
EVEN, HIGHEST = tl.constexpr(definition.EVEN), tl.constexpr(definition.HIGHEST)
STEP, FASTEST = tl.constexpr(definition.STEP), tl.constexpr(definition.FASTEST)
MOMENTUM, FAR = tl.constexpr(definition.MOMENTUM), tl.constexpr(definition.FAR)
POINT = tl.constexpr(definition.POINT)
ONE, FRACTION = tl.constexpr(1 << definition.BITS), tl.constexpr((1 << definition.BITS) - 1)
WHOLE, HALF = tl.constexpr(2.0**definition.POINT), tl.constexpr(1 << definition.POINT - 1)


@triton.jit(do_not_specialize=["pairs"])
def _count(ids, blocks, pairs, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    after_previous()
    block = tl.program_id(0)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    there = pair < pairs
    found = tl.histogram(tl.load(ids + pair, mask=there, other=0).to(tl.int32), EXPERTS_BLOCK, mask=there)
    expert = tl.arange(0, EXPERTS_BLOCK)
    tl.store(blocks + block * EXPERTS + expert, found.to(tl.int16), mask=expert < EXPERTS)


@triton.jit
def _total(blocks, number, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """Rows of each expert in the first ``number`` blocks."""
    expert = tl.arange(0, EXPERTS_BLOCK)
    total = tl.zeros((EXPERTS_BLOCK,), tl.int32)
    for first in range(0, number, AT_ONCE):
        block = first + tl.arange(0, AT_ONCE)
        there = (block < number)[:, None] & (expert < EXPERTS)[None, :]
        found = tl.load(blocks + block[:, None] * EXPERTS + expert[None, :], mask=there, other=0)
        total += tl.sum(found.to(tl.int32), axis=0)
    return total


@triton.jit
def _exp2(log):
    fraction = log & FRACTION
    mantissa = ONE + ((fraction * (2688 + ((fraction * 1408) >> BITS))) >> BITS)
    shift = (log >> BITS) - BITS
    return tl.where(shift >= 0, mantissa << tl.maximum(shift, 0), mantissa >> tl.maximum(-shift, 0))


@triton.jit
def _log2(x):
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) >> (23 - BITS)
    fraction = bits & FRACTION
    return bits - fraction + ((fraction * (5504 - ((fraction * 1408) >> BITS))) >> BITS)


@triton.jit
def _part(rows, total):
    return (tl.div_rn(rows.to(tl.float32), tl.maximum(total, 1).to(tl.float32)) * WHOLE).to(tl.int64)


@triton.jit
def _end(upto, total, part, rows):
    end = (upto.to(tl.int64) * part[:, None] + HALF) >> POINT
    end = tl.minimum(end.to(tl.int32), rows[:, None])
    return tl.where(upto == total[:, None], rows[:, None], end)


@triton.jit
def _ends(rows, there, fixed, power):
    """Where each rank's rows of an expert end, and the busiest rank's rows."""
    powers = tl.where(there, power[None, :], 0)
    upto = tl.cumsum(powers, axis=1)
    total = tl.sum(powers, axis=1)
    part = _part(rows, total)
    ends = _end(upto, total, part, rows)
    took = tl.where(there, ends - _end(upto - powers, total, part, rows), 0)
    return ends, tl.max(fixed + tl.sum(took, axis=0), axis=0)


@triton.jit(do_not_specialize=["pairs", "number"])
def _divide(
    blocks,
    home,
    shared,
    slots,
    counts,
    ends,
    pairs,
    number,
    PER_RANK: tl.constexpr,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    RANKS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    SHARED_BLOCK: tl.constexpr,
    RANKS_BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    after_previous()
    expert = tl.arange(0, EXPERTS_BLOCK)
    total = _total(blocks, number, EXPERTS, EXPERTS_BLOCK, AT_ONCE)
    tl.store(counts + expert, total.to(tl.int64), mask=expert < EXPERTS)

    rank = tl.arange(0, RANKS_BLOCK)
    row = tl.arange(0, SHARED_BLOCK)
    which = tl.load(shared + row, mask=row < SHARED, other=-1)
    inside = (row < SHARED)[:, None] & (rank < RANKS)[None, :]
    there = tl.load(slots + row[:, None] * RANKS + rank[None, :], mask=inside, other=-1) >= 0
    tl.debug_barrier()  # counts are there for all threads
    rows = tl.load(counts + which, mask=which >= 0, other=0).to(tl.int32)
    fixed = tl.zeros((RANKS_BLOCK,), tl.int32)
    for first in tl.static_range(0, EXPERTS, CHUNK):
        some = first + tl.arange(0, CHUNK)
        slot = tl.load(home + some, mask=some < EXPERTS, other=-1).to(tl.int32)
        found = tl.load(counts + some, mask=some < EXPERTS, other=0).to(tl.int32)
        here = (slot >= 0)[:, None] & ((slot // PER_RANK)[:, None] == rank[None, :])
        fixed += tl.sum(tl.where(here, found[:, None], 0), axis=0)

    base = fixed.to(tl.int64) << POINT
    mean = _log2((pairs.to(tl.int64) << POINT) // RANKS)
    step = tl.minimum(pairs * STEP // tl.maximum(tl.sum(rows, axis=0), 1), FASTEST)
    weight = tl.full((RANKS_BLOCK,), EVEN, tl.int32)
    best = weight
    velocity = tl.zeros((RANKS_BLOCK,), tl.int32)
    lowest = tl.full((), 2**62, tl.int64)
    for turn in range(ROUNDS):
        power = _exp2(weight)
        part = _part(rows, tl.sum(tl.where(there, power[None, :], 0), axis=1))
        load = base + power.to(tl.int64) * tl.sum(tl.where(there, part[:, None], 0), axis=0)
        peak = tl.max(load, axis=0)
        best = tl.where(peak < lowest, weight, best)
        lowest = tl.minimum(peak, lowest)
        momentum = tl.minimum(MOMENTUM, 256 * turn // (turn + 3))
        off = tl.minimum(tl.maximum(_log2(load) - mean, -FAR), FAR)
        velocity = ((velocity * momentum) >> 8) - ((off * step) >> 4)
        weight = weight + velocity
        middle = tl.sum(tl.where(rank < RANKS, weight, 0), axis=0) // RANKS
        weight = tl.minimum(tl.maximum(weight - middle + EVEN, 0), HIGHEST)

    even, even_peak = _ends(rows, there, fixed, _exp2(tl.full((RANKS_BLOCK,), EVEN, tl.int32)))
    found, peak = _ends(rows, there, fixed, _exp2(best))
    chosen = tl.where(peak < even_peak, found, even)
    tl.store(ends + row[:, None] * RANKS + rank[None, :], chosen, mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def _assign(
    ids,
    blocks,
    home,
    slots,
    ends,
    out,
    pairs,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    RANKS_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    after_previous()
    block = tl.program_id(0)
    index = tl.arange(0, PAIRS)
    pair = block * PAIRS + index
    there = pair < pairs
    expert = tl.load(ids + pair, mask=there, other=0).to(tl.int32)
    other = tl.load(ids + block * PAIRS + index, mask=there, other=-1).to(tl.int32)
    same = (expert[:, None] == other[None, :]) & (index[None, :] < index[:, None])
    nth = tl.sum(same.to(tl.int32), axis=1)
    nth += tl.gather(_total(blocks, block, EXPERTS, EXPERTS_BLOCK, AT_ONCE), expert, axis=0)
    at = tl.load(home + expert).to(tl.int32)
    row = tl.maximum(-1 - at, 0)
    rank = tl.arange(0, RANKS_BLOCK)
    reach = (there & (at < 0))[:, None] & (rank < RANKS)[None, :]
    end = tl.load(ends + row[:, None] * RANKS + rank[None, :], mask=reach, other=2**31 - 1)
    chosen = tl.sum((end <= nth[:, None]).to(tl.int32), axis=1)
    at = tl.where(at < 0, tl.load(slots + row * RANKS + chosen, mask=there & (at < 0), other=0), at)
    tl.store(out + pair, at.to(tl.int64), mask=there)


def assign_slots(
    ids: Tensor, home: Tensor, shared: Tensor, slots: Tensor, per_rank: int, rounds: int
) -> tuple[Tensor, Tensor]:
    pairs, experts, (several, ranks) = ids.numel(), home.shape[0], slots.shape
    ids = ids.contiguous()
    out = torch.empty_like(ids)
    if not pairs:
        return out, torch.zeros(experts, dtype=torch.int64, device=ids.device)
    number = triton.cdiv(pairs, PAIRS)
    experts_block, ranks_block = triton.next_power_of_2(experts), triton.next_power_of_2(ranks)
    blocks = torch.empty(number, experts, dtype=torch.int16, device=ids.device)
    counts = torch.empty(experts, dtype=torch.int64, device=ids.device)
    ends = torch.empty(several, ranks, dtype=torch.int32, device=ids.device)
    _count[(number,)](ids, blocks, pairs, experts, experts_block, PAIRS, **OVERLAP)
    shared_block = triton.next_power_of_2(several)
    _divide[(1,)](
        blocks,
        home,
        shared,
        slots,
        counts,
        ends,
        pairs,
        number,
        per_rank,
        experts,
        several,
        ranks,
        experts_block,
        shared_block,
        ranks_block,
        AT_ONCE,
        CHUNK,
        rounds,
        num_warps=4 if shared_block * ranks_block <= 4096 else 16,
        **OVERLAP,
    )
    _assign[(number,)](
        ids,
        blocks,
        home,
        slots,
        ends,
        out,
        pairs,
        experts,
        ranks,
        experts_block,
        ranks_block,
        PAIRS,
        AT_ONCE,
        num_warps=8,
        **OVERLAP,
    )
    return out, counts
