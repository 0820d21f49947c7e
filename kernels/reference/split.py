"""Which slot computes which row's expert, where an expert lies in several: the busiest rank gets as few rows as can be.

Every rank has a weight, and an expert's rows go to its ranks in proportion to their weights. All begin with the same; a
rank above the mean lowers its weight, one below raises it, with momentum, and the lowest peak met on the way counts. At
rest, two ranks that share an expert have equal loads or the busier one takes none of it: the optimum of the linear
program.

Ranks work this out without a word, so it is made of what is the same everywhere: integers, and a division and
conversions of float32, which IEEE 754 rounds one way. A weight is kept as its logarithm to base 2, 12 bits of it behind
the point.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 12  # of a logarithm, behind the point
EVEN, HIGHEST = 16 << BITS, 24 << BITS  # logarithms: the mean of all ranks, the highest; 0 is the lowest
STEP, FASTEST = 24, 128  # sixteenths: what a deviation from the mean does to a weight where all rows can move; at most
MOMENTUM = 192  # of 256
FAR = 3 << BITS  # a deviation above this counts as this
POINT = 32  # bits behind the point of a rank's rows


def assign_slots(
    ids: Tensor, home: Tensor, shared: Tensor, slots: Tensor, per_rank: int, rounds: int
) -> tuple[Tensor, Tensor]:
    flat = ids.flatten()
    some = (flat >= 0).to(torch.int64)
    counts = torch.zeros(home.shape[0], dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, flat.clamp(min=0), some)
    single = home >= 0
    fixed = torch.zeros(slots.shape[1], dtype=torch.int64, device=ids.device)
    fixed.scatter_add_(0, torch.where(single, home // per_rank, 0), torch.where(single, counts, 0))
    rows = torch.where(shared >= 0, counts[shared.clamp(min=0)], 0)
    ends = _divide(rows, slots >= 0, fixed, rounds)
    # The n-th row of an expert goes to the first rank whose rows, with those of the ranks before it, cover n.
    order = flat.argsort(stable=True)
    begins = counts.cumsum(0) - counts + (1 - some).sum()  # those of no expert come first
    nth = torch.empty_like(flat)
    nth[order] = torch.arange(flat.shape[0], device=flat.device) - begins[flat[order]]
    at = home[flat]
    row = (-1 - at).clamp(min=0)
    rank = (nth[:, None] >= ends[row]).sum(1).clamp(max=slots.shape[1] - 1)
    at = torch.where(at >= 0, at, slots[row, rank])
    return torch.where(flat >= 0, at, -1).view(ids.shape), counts


def _divide(rows: Tensor, there: Tensor, fixed: Tensor, rounds: int) -> Tensor:
    """int64 [K, R] rows of each expert that a rank and those before it take. rows: int64 [K]; there: bool [K, R] where
    they may go; fixed: int64 [R] rows that cannot move."""
    ranks, total = fixed.shape[0], fixed.sum() + rows.sum()
    mean = _log2(((total << POINT) // ranks)[None])
    step = (STEP * total // rows.sum().clamp(min=1)).clamp(max=FASTEST)
    weight = best = torch.full_like(fixed, EVEN)
    velocity = torch.zeros_like(fixed)
    lowest = torch.full((1,), torch.inf, device=rows.device)
    for turn in range(rounds):
        power = _exp2(weight)
        load = (fixed << POINT) + power * (there * _part(rows, there, power)[:, None]).sum(0)
        peak = load.to(torch.float32).max()
        best, lowest = torch.where(peak < lowest, weight, best), torch.minimum(peak, lowest)
        momentum = min(MOMENTUM, 256 * turn // (turn + 3))
        velocity = (velocity * momentum >> 8) - ((_log2(load) - mean).clamp(-FAR, FAR) * step >> 4)
        # What no weight can mend drives weights apart for ever; only their differences mean something.
        weight = (weight + velocity + EVEN - weight.sum() // ranks).clamp(0, HIGHEST)
    even, found = (_ends(rows, there, _exp2(each)) for each in (torch.full_like(fixed, EVEN), best))
    # In whole rows, the even division may be the better one.
    peaks = [(fixed + ends.diff(dim=1, prepend=torch.zeros_like(rows)[:, None]).sum(0)).max() for ends in (even, found)]
    return torch.where(peaks[1] < peaks[0], found, even)


def _part(rows: Tensor, there: Tensor, power: Tensor) -> Tensor:
    """int64 [K]: rows of each expert for a weight of 1, with ``POINT`` bits behind the point."""
    total = (there * power).sum(1).clamp(min=1)
    return (rows.to(torch.float32) / total.to(torch.float32) * 2.0**POINT).to(torch.int64)


def _ends(rows: Tensor, there: Tensor, power: Tensor) -> Tensor:
    """The division by these weights in whole rows, rounded."""
    upto = (there * power).cumsum(1)
    ends = upto * _part(rows, there, power)[:, None] + (1 << POINT - 1) >> POINT
    return torch.where(upto == upto[:, -1:], rows[:, None], torch.minimum(ends, rows[:, None]))


def _exp2(log: Tensor) -> Tensor:
    """2^(log / 2^BITS), 1 to 2^24, within 1 %: a parabola between powers of two."""
    one, fraction = 1 << BITS, log & (1 << BITS) - 1
    mantissa = one + (fraction * (2688 + (fraction * 1408 >> BITS)) >> BITS)
    return mantissa << (log >> BITS) >> BITS


def _log2(x: Tensor) -> Tensor:
    """log2(x) * 2^BITS and a constant, of x >= 0, likewise; 0 for 0."""
    bits = x.to(torch.float32).view(torch.int32).to(torch.int64) >> 23 - BITS
    fraction = bits & (1 << BITS) - 1
    return bits - fraction + (fraction * (5504 - (fraction * 1408 >> BITS)) >> BITS)
