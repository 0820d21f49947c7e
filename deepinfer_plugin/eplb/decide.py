"""Whether to rebalance, and how: what rank 0 works out from a window of steps. Pure numpy and torch; see ``policy.py``.

Two things can change: where experts lie, and how the replicas of one share its rows. The second costs nothing. Shares
are those of the policy's split for the window's mean, fixed until the next decision: splitting every step by its own
counts would cost more than it saves (docs/eplb.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from .migration import Round, rounds
from .policy import Split, forecast, place

MOE_SHARE = 0.44  # of a step's time is in routed experts: 43 to 49 % on an H200 (docs/kernels.md)
SHUFFLED = 0.5  # of a layer's slots, for ``shuffle``


@dataclass(frozen=True)
class Placed:
    """Where experts lie, int64 [layers, physical], and the weights of ranks, float64 [layers, ranks], by which replicas
    share their expert's rows."""

    placement: NDArray[np.int64]
    weights: NDArray[np.float64]

    def peak(self, counts: NDArray[np.number]) -> NDArray[np.float64]:
        """[layers]: the busiest rank's rows, summed over the steps of counts [steps, layers, experts]."""
        split = Split.of(self.placement, counts.shape[2], self.weights.shape[1])
        rows = torch.from_numpy(np.ascontiguousarray(counts.transpose(1, 0, 2), dtype=np.float32))
        weights = torch.from_numpy(np.log(self.weights).astype(np.float32))[:, None].expand(-1, rows.shape[1], -1)
        return split.loads(rows, weights).amax(dim=2).sum(dim=1).double().numpy()


@dataclass(frozen=True)
class Request:
    counts: NDArray[np.integer]  # [steps, layers, experts], oldest first, at least one step
    current: Placed
    previous: Placed | None  # before the latest rebalance
    interval: int  # steps until the next decision
    step_s: float  # a usual step
    call_s: float  # what a step waits longer for while experts move
    calls_per_round: int  # steps of a round of moves

    @property
    def ranks(self) -> int:
        return self.current.weights.shape[1]


@dataclass(frozen=True)
class Decision:
    """``rounds`` of moves, perhaps none, then ``weights``; without these all stays as it is. A balance is the mean
    rank's rows over the busiest rank's, summed over steps and layers of the window: 1 is perfect."""

    rounds: list[Round]
    weights: NDArray[np.float64] | None
    balance: float  # of the window, as it is placed now
    forecast: float  # of the window, as it would be placed
    gain_s: float  # until the next decision
    cost_s: float
    # Share of the busiest rank's rows that the latest rebalance saved, on rows that came after it.
    real_gain: float | None


def decide(request: Request) -> Decision:
    """The change that is forecast to gain most, net of what it costs; none, if nothing gains more than it costs.

    gain: the share of the busiest rank's rows that a change saves, of the part of a step that is spent in experts,
    times the steps of an interval. cost: the steps of the migration times what each waits longer.
    """
    counts, current, ranks = request.counts, request.current, request.ranks
    window = forecast(counts)
    targets = [current.placement]
    for even_split in (True, False):
        target = place(counts, current.placement.shape[1], ranks, current=current.placement, even_split=even_split)
        targets.append(_once_a_rank(target, current.placement, ranks))
    found = [_decision(request, window, _weighed(target, window, ranks)) for target in targets]
    best = max(found, key=lambda each: each.gain_s - each.cost_s)
    return best if best.gain_s > best.cost_s else replace(best, rounds=[], weights=None)


def shuffle(request: Request, seed: int) -> Decision:
    """Move experts about and weigh ranks at random, whatever it costs: for tests."""
    random, target = np.random.default_rng(seed), request.current.placement.copy()
    slots = target.shape[1] // request.ranks
    for layer in target:
        for a, b in random.integers(0, len(layer), (int(SHUFFLED * len(layer)), 2)):
            own = [layer[slot // slots * slots :][:slots] for slot in (a, b)]
            if layer[a] not in own[1] and layer[b] not in own[0]:
                layer[[a, b]] = layer[[b, a]]
            elif (layer == layer[a]).sum() > 1 and layer[b] not in own[0]:
                layer[a] = layer[b]
    weights = random.uniform(0.2, 1.0, request.current.weights.shape)
    return _decision(request, forecast(request.counts), Placed(target, weights))


def _weighed(placement: NDArray[np.int64], window: NDArray[np.float32], ranks: int) -> Placed:
    """With weights that suit the window's mean, in the layers whose steps they suit better than an even share."""
    even = Placed(placement, np.ones((len(placement), ranks)))
    if placement.shape[1] == window.shape[2]:
        return even
    mean = torch.from_numpy(window.mean(axis=0))[:, None]
    balanced = Split.of(placement, window.shape[2], ranks).balance(mean)[:, 0].double().exp().numpy()
    better = Placed(placement, balanced).peak(window) < even.peak(window)
    return Placed(placement, np.where(better[:, None], balanced, 1.0))


def _decision(request: Request, window: NDArray[np.float32], target: Placed) -> Decision:
    now, then = (float(placed.peak(window).sum()) for placed in (request.current, target))
    moves = rounds(request.current.placement, target.placement, request.ranks)
    mean = float(window.sum()) / request.ranks
    return Decision(
        rounds=moves,
        weights=target.weights,
        balance=mean / now if now else 1.0,
        forecast=mean / then if then else 1.0,
        gain_s=max(0.0, 1 - then / now) * MOE_SHARE * request.step_s * request.interval if now else 0.0,
        cost_s=len(moves) * request.calls_per_round * request.call_s,
        real_gain=_real_gain(request),
    )


def _real_gain(request: Request) -> float | None:
    if request.previous is None:
        return None
    before, after = (float(placed.peak(request.counts).sum()) for placed in (request.previous, request.current))
    return 1 - after / before if before else 0.0


def _once_a_rank(target: NDArray[np.int64], current: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """Where the policy, for want of room elsewhere, put an expert on a rank twice, a layer stays as it is."""
    sorted_ = np.sort(target.reshape(len(target), ranks, -1), axis=2)
    twice = (sorted_[:, :, 1:] == sorted_[:, :, :-1]).any(axis=(1, 2))
    return np.where(twice[:, None], current, target)
