"""Whether to rebalance, and how: what rank 0 works out from a window of steps. Pure numpy; see ``policy.py``.

Where experts lie is decided here. How the replicas of one share its rows is decided every step by ``Ops.assign_slots``;
what that makes of a placement ``forecast_cost`` foresees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .migration import Round, rounds
from .policy import forecast, forecast_cost, place

MOE_SHARE = 0.44  # of a step's time is in routed experts: 43 to 49 % on an H200 (docs/kernels.md)
SHUFFLED = 0.5  # of a layer's slots, for ``shuffle``


@dataclass(frozen=True)
class Request:
    counts: NDArray[np.integer]  # [steps, layers, experts], oldest first, at least one step
    ranks: int
    current: NDArray[np.int64]  # placement [layers, physical]
    previous: NDArray[np.int64] | None  # before the latest rebalance
    interval: int  # steps until the next decision
    step_s: float  # a usual step
    call_s: float  # what a step waits longer for while experts move
    calls_per_round: int  # steps of a round of moves
    even_split: bool = False  # replicas share their expert's rows evenly


@dataclass(frozen=True)
class Decision:
    """``rounds`` of moves; without any, all stays as it is. A balance is the mean rank's rows over the busiest rank's,
    summed over steps and layers of the window: 1 is perfect."""

    rounds: list[Round]
    balance: float  # of the window, as it is placed now
    forecast: float  # of the window, as it would be placed
    gain_s: float  # until the next decision
    cost_s: float
    # Share of the busiest rank's rows that the latest rebalance saved, on rows that came after it.
    real_gain: float | None


def decide(request: Request) -> Decision:
    """The change that the policy would make, if it is forecast to gain more than it costs.

    gain: the share of the busiest rank's rows that a change saves, of the part of a step that is spent in experts,
    times the steps of an interval. cost: the steps of the migration times what each waits longer.
    """
    current = request.current
    even = request.even_split
    target = place(request.counts, current.shape[1], request.ranks, current=current, even_split=even)
    found = _decision(request, _once_a_rank(target, current, request.ranks))
    return found if found.gain_s > found.cost_s else replace(found, rounds=[])


def shuffle(request: Request, seed: int) -> Decision:
    """Move experts about at random, whatever it costs: for tests."""
    random, target = np.random.default_rng(seed), request.current.copy()
    slots = target.shape[1] // request.ranks
    for layer in target:
        for a, b in random.integers(0, len(layer), (int(SHUFFLED * len(layer)), 2)):
            own = [layer[slot // slots * slots :][:slots] for slot in (a, b)]
            if layer[a] not in own[1] and layer[b] not in own[0]:
                layer[[a, b]] = layer[[b, a]]
            elif (layer == layer[a]).sum() > 1 and layer[b] not in own[0]:
                layer[a] = layer[b]
    return _decision(request, target)


def _decision(request: Request, target: NDArray[np.int64]) -> Decision:
    window, ranks = forecast(request.counts), request.ranks
    now, then = (_peak(request, window, placed) for placed in (request.current, target))
    moves = rounds(request.current, target, ranks)
    mean = float(window.sum()) / ranks
    return Decision(
        rounds=moves,
        balance=mean / now if now else 1.0,
        forecast=mean / then if then else 1.0,
        gain_s=max(0.0, 1 - then / now) * MOE_SHARE * request.step_s * request.interval if now else 0.0,
        cost_s=len(moves) * request.calls_per_round * request.call_s,
        real_gain=_real_gain(request),
    )


def _real_gain(request: Request) -> float | None:
    if request.previous is None:
        return None
    before, after = (_peak(request, request.counts, placed) for placed in (request.previous, request.current))
    return 1 - after / before if before else 0.0


def _peak(request: Request, counts: NDArray[np.number], placement: NDArray[np.int64]) -> float:
    """The busiest rank's rows, summed over steps and layers."""
    return float(forecast_cost(counts, placement, request.ranks, request.even_split).sum())


def _once_a_rank(target: NDArray[np.int64], current: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """Where the policy, for want of room elsewhere, put an expert on a rank twice, a layer stays as it is."""
    sorted_ = np.sort(target.reshape(len(target), ranks, -1), axis=2)
    twice = (sorted_[:, :, 1:] == sorted_[:, :, :-1]).any(axis=(1, 2))
    return np.where(twice[:, None], current, target)
