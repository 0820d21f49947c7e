"""Which rank holds which experts, and which share of an expert's tokens each of its replicas takes.

A logical expert is one of the model's; a physical expert is a copy of it in some rank's memory. Rank r holds the
physical experts r * slots .. (r + 1) * slots - 1. A step of an expert-parallel layer takes as long as its busiest rank.
Two decisions keep that rank near the mean:

* **placement** (``place``, numpy on the host, rarely): which logical expert each physical one is. It is made from a
  window of past steps and costs bytes to change.
* **split** (every step, on the device): the shares, from that step's tokens. It costs nothing to change, so it absorbs
  whatever the window did not foresee. ``Ops.assign_slots`` serves; ``Split`` foresees it, for many steps at once.

The second changes what is good for the first. An expert with replicas on two ranks is a pipe between them: load that
one rank has too much flows to the other one. All ranks can be brought to the same load only if the pipes connect them
all, and ``place`` sees to that before it looks at loads; a placement that only balances an even split leaves islands.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The forecast.
GROUPS = 32  # steps of a window are averaged down to so many: what changes faster cannot be foreseen
RECENT = 1.0  # the newest group counts e^RECENT times the oldest
# The greedy placement; charges are shares of what a perfectly balanced rank computes.
SOFT = 0.1  # of its tokens, what a replica counts: the split can send the rest elsewhere
LINK = 0.3  # charge for a replica that connects no further rank
STAY = 0.016, 0.002, 0.0002  # charges for an expert that is new to a rank: one candidate each
NEAR = 0.25  # of a move's charge and price, if the expert comes from a rank of the same node
PRICE = 1e-5  # of moving one expert, against the busiest rank's load over the window
# The split.
ITERATIONS = 40
FEW = 16  # iterations tell placements apart
STEP, MOMENTUM = 2.0, 0.8
RANGE = 40.0  # of weights, around their mean: e^80 is still a float32


class PolicyError(ValueError):
    """Shapes or numbers that fit no placement; names what is wrong and what is legal."""


# ---- placement -----------------------------------------------------------------------------------------------------


def place(
    counts: NDArray[np.number],
    physical: int,
    ranks: int,
    nodes: int = 1,
    current: NDArray[np.integer] | None = None,
    price: float = PRICE,
    even_split: bool = False,
) -> NDArray[np.int64]:
    """Physical-to-logical map int64 [layers, physical] for the steps after a window.

    counts: [steps, layers, experts] tokens routed to each logical expert, oldest step first. physical: number of
    physical experts of a layer. ranks, nodes: rank r is on node r // (ranks / nodes). current: int [layers, physical],
    the placement in force; None: there is none, and moving is free. price: of moving one expert of one layer to a
    rank that does not hold it, as a share of what a perfectly balanced rank computes over the window. even_split:
    whoever serves splits tokens evenly over replicas, not as ``Split`` does.

    Per layer the best of several candidates by ``forecast_cost`` plus price: the current placement, and greedy ones
    that are more and less reluctant to move. A rank that keeps an expert keeps it in the same slot. Deterministic;
    ties go to the lower index.

    Raises:
        PolicyError: a size that does not fit another.
    """
    counts = np.asarray(counts)
    _check(counts, physical, ranks, nodes, current)
    layers, experts = counts.shape[1:]
    window = forecast(counts)
    replicas = _replicate(window, physical, ranks)
    distance = _distance(current, layers, experts, ranks, nodes)
    if current is None:
        return _greedy(window, replicas, ranks, distance, even_split)
    current = np.asarray(current, dtype=np.int64)
    candidates = [current]
    candidates += [_greedy(window, replicas, ranks, stay * distance, even_split) for stay in STAY]
    perfect = window.sum(axis=(0, 2)) / ranks
    costs = []
    for candidate in candidates:
        moved = _gather(distance, candidate, ranks).sum(axis=1)
        costs.append(forecast_cost(window, candidate, ranks, even_split) + price * perfect * moved)
    chosen = np.stack(candidates)[np.argmin(costs, axis=0), np.arange(layers)]
    return _keep_slots(chosen, current, ranks)


def forecast_cost(
    counts: NDArray[np.number], placement: NDArray[np.integer], ranks: int, even_split: bool = False
) -> NDArray[np.float64]:
    """[layers]: sum over steps of the busiest rank's tokens, each step split by ``Split`` or evenly. counts: [steps,
    layers, experts]; placement: [layers, physical]."""
    split = Split.of(placement, counts.shape[2], ranks)
    tokens = torch.from_numpy(np.ascontiguousarray(counts.transpose(1, 0, 2), dtype=np.float32))
    weights = None if even_split else split.balance(tokens, FEW)
    return split.loads(tokens, weights).amax(dim=2).sum(dim=1).double().numpy()


def forecast(counts: NDArray[np.number]) -> NDArray[np.float32]:
    """[groups, layers, experts]: what ``place`` expects of a window [steps, layers, experts]: few steps, newer ones
    scaled up so that sums over steps favour them."""
    groups = min(GROUPS, len(counts))
    edges = np.linspace(0, len(counts), groups + 1).astype(np.int64)
    means = np.add.reduceat(counts, edges[:-1], axis=0, dtype=np.float32) / np.diff(edges)[:, None, None]
    weights = np.exp(RECENT * (np.arange(groups) + 1 - groups) / groups)
    return (means * weights[:, None, None]).astype(np.float32)


def _check(
    counts: NDArray[np.number], physical: int, ranks: int, nodes: int, current: NDArray[np.integer] | None
) -> None:
    if counts.ndim != 3 or 0 in counts.shape:
        raise PolicyError(
            f"counts: shape {counts.shape} is not supported; legal: [steps, layers, experts], none of them 0"
        )
    if not np.isfinite(counts).all() or (counts < 0).any():
        raise PolicyError("counts: negative or not finite; legal: numbers of tokens")
    _, layers, experts = counts.shape
    if ranks < 1 or physical % ranks:
        raise PolicyError(f"physical={physical} is not divisible by ranks={ranks}; legal: multiples of {max(ranks, 1)}")
    if not experts <= physical <= experts * ranks:
        raise PolicyError(f"physical={physical} for {experts} experts; legal: {experts} to {experts * ranks}")
    if nodes < 1 or ranks % nodes:
        raise PolicyError(f"nodes={nodes} does not divide ranks={ranks}; legal: its divisors")
    if current is None:
        return
    current = np.asarray(current)
    if current.shape != (layers, physical):
        raise PolicyError(f"current: shape {current.shape} is not supported; legal: {(layers, physical)}")
    if current.min() < 0 or current.max() >= experts or _holds(current, experts, 1).min() == 0:
        raise PolicyError(f"current: experts out of range or without a replica; legal: every one of 0 to {experts - 1}")


def _replicate(counts: NDArray[np.number], physical: int, ranks: int) -> NDArray[np.int64]:
    """[layers, experts] replicas of each expert: one more, again and again, for the one with most tokens a replica."""
    layers, experts = counts.shape[1:]
    tokens = counts.mean(axis=0)
    replicas = np.ones((layers, experts), dtype=np.int64)
    every = np.arange(layers)
    for _ in range(physical - experts):
        replicas[every, np.where(replicas < ranks, tokens / replicas, -1).argmax(axis=1)] += 1
    return replicas


def _holds(placement: NDArray[np.integer], experts: int, ranks: int) -> NDArray[np.int64]:
    """[layers, experts, ranks]: how many replicas of an expert a rank has."""
    layers, physical = placement.shape
    rank = np.arange(physical) // (physical // ranks)
    flat = (np.arange(layers)[:, None] * experts + placement) * ranks + rank
    return np.bincount(flat.ravel(), minlength=layers * experts * ranks).reshape(layers, experts, ranks)


def _distance(
    current: NDArray[np.integer] | None, layers: int, experts: int, ranks: int, nodes: int
) -> NDArray[np.float32]:
    """[layers, experts, ranks]: what bringing an expert to a rank costs: 0 where it is, NEAR within a node, else 1."""
    if current is None:
        return np.zeros((layers, experts, ranks), dtype=np.float32)
    on_rank = _holds(np.asarray(current), experts, ranks) > 0
    on_node = on_rank.reshape(layers, experts, nodes, -1).any(axis=3).repeat(ranks // nodes, axis=2)
    if nodes == 1:
        return (~on_rank).astype(np.float32)
    return np.where(on_rank, 0, np.where(on_node, NEAR, 1)).astype(np.float32)


def _gather(table: NDArray[np.floating], placement: NDArray[np.integer], ranks: int) -> NDArray[np.floating]:
    """[layers, physical]: the entry of [layers, experts, ranks] for each physical expert."""
    layers, physical = placement.shape
    return table[np.arange(layers)[:, None], placement, np.arange(physical) // (physical // ranks)]


def _greedy(
    window: NDArray[np.float32],
    replicas: NDArray[np.int64],
    ranks: int,
    charge: NDArray[np.float32],
    even_split: bool,
) -> NDArray[np.int64]:
    """One pass over all physical experts by falling load, all layers at once.

    Each goes to the rank with a free slot whose loads over the steps coincide least with its own (inner product): that
    keeps the sum of squares down, which foresees better than the window's own peaks. Replicas of one expert go to
    different ranks. Unless the split is even they come first, rather connect ranks that are not connected yet, and
    count little, so that what cannot move is balanced above all.

    charge: [layers, experts, ranks] for putting an expert there.
    """
    groups, layers, experts = window.shape
    slots = int(replicas[0].sum()) // ranks
    every = np.arange(layers)
    many = (replicas > 1) & (not even_split)
    counted = window / replicas * np.where(many, SOFT, 1)
    loads_of = np.ascontiguousarray(counted.transpose(1, 2, 0), dtype=np.float32)  # of one physical expert
    mean = window.sum(axis=(0, 2))[:, None] / ranks  # [layers, 1] what a balanced rank computes
    charges = charge * mean[:, :, None]
    scale = groups / np.maximum(mean, 1e-9)

    loads = np.zeros((layers, ranks, groups), dtype=np.float32)
    used = np.zeros((layers, ranks), dtype=np.int64)
    holds = np.zeros((layers, experts, ranks), dtype=bool)
    island = np.tile(np.arange(ranks), (layers, 1))  # ranks with the same number are connected
    last = np.full((layers, experts), -1)  # rank of the expert's latest replica
    placement = np.empty((layers, slots * ranks), dtype=np.int64)
    for expert in _order(loads_of.sum(axis=2), replicas, many).T:
        load = loads_of[every, expert]
        placed = (last[every, expert] >= 0)[:, None]
        own = island[every, last[every, expert]][:, None]
        score = (loads @ load[:, :, None])[:, :, 0] * scale + charges[every, expert]
        score += LINK * mean * ((island == own) & placed & many[every, expert, None])
        score[holds[every, expert]] = np.finfo(np.float32).max  # only if nothing else is free
        score[used == slots] = np.inf
        rank = score.argmin(axis=1)
        placement[every, rank * slots + used[every, rank]] = expert
        used[every, rank] += 1
        holds[every, expert, rank] = True
        loads[every, rank] += load
        island = np.where(placed & (island == island[every, rank][:, None]), own, island)
        last[every, expert] = rank
    return placement


def _order(load: NDArray[np.floating], replicas: NDArray[np.int64], early: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[layers, physical] experts, each as often as it has replicas; all arguments are [layers, experts]."""
    layers, experts = load.shape
    first = np.lexsort((np.broadcast_to(np.arange(experts), load.shape), -load, ~early), axis=1)
    times = np.take_along_axis(replicas, first, axis=1)
    return first.ravel().repeat(times.ravel()).reshape(layers, -1)


def _keep_slots(placement: NDArray[np.int64], current: NDArray[np.integer], ranks: int) -> NDArray[np.int64]:
    """The same experts on the same ranks, each in the slot it had there if it was there."""
    layers, physical = placement.shape
    new = placement.reshape(layers * ranks, -1)
    old = np.asarray(current).reshape(layers * ranks, -1)
    result = np.full_like(new, -1)
    for row, (want, have) in enumerate(zip(new.tolist(), old.tolist(), strict=True)):
        if want == have:
            result[row] = want
            continue
        for slot, expert in enumerate(have):
            if expert in want:
                want.remove(expert)
                result[row, slot] = expert
        result[row, result[row] < 0] = want
    return result.reshape(layers, physical)


# ---- split ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """What splitting needs to know of a placement.

    Every rank has a weight, and an expert's tokens go to its replicas in proportion to the weights of their ranks. All
    weights equal is the even split; a rank above the mean lowers its weight, one below raises it. At rest, two ranks
    that share an expert have equal loads, or the busier one takes none of it: the optimum of the linear program.

    Counts are tokens, weights natural logarithms. S is any number of steps, each of which is split by itself.
    """

    placement: Tensor  # int64 [layers, physical]
    experts: Tensor  # int64 [layers, K] the experts with replicas, padded with others; K as many as could have any
    movable: Tensor  # float32 [layers, 1, K] 1 for an expert with replicas, 0 for padding
    single: Tensor  # float32 [layers, 1, physical] 1 for the only physical expert of a logical one
    links: Tensor  # float32 [layers, K, ranks] replicas of each on each rank

    @classmethod
    def of(cls, placement: NDArray[np.integer], experts: int, ranks: int) -> Split:
        """placement: int [layers, physical]; experts: number of logical ones."""
        placement = np.asarray(placement, dtype=np.int64)
        holds = _holds(placement, experts, ranks)
        replicas = holds.sum(axis=2)
        # No more experts than there are spare places can have replicas.
        size = max(1, min(placement.shape[1] - experts, experts))
        rows = np.argsort(replicas == 1, axis=1, kind="stable")[:, :size]
        every = np.arange(len(placement))[:, None]
        single = replicas[every, placement] == 1
        host = (
            placement,
            rows,
            (replicas[every, rows] > 1)[:, None].astype(np.float32),
            single[:, None].astype(np.float32),
            holds[every, rows].astype(np.float32),
        )
        return cls(*map(torch.from_numpy, host))

    def balance(self, counts: Tensor, iterations: int = ITERATIONS) -> Tensor:
        """Weights float32 [layers, S, ranks] for counts [layers, S, experts]: those of the lowest busiest rank met on
        the way, so never worse than an even split of the same counts."""
        base, tokens = self._parts(counts)
        mean = ((base.sum(2) + tokens.sum(2)) / base.shape[2]).clamp(min=1e-6)[:, :, None]
        # The fewer tokens can move, the less a weight does.
        step = (STEP * mean * base.shape[2] / tokens.sum(2, keepdim=True).clamp(min=1e-6)).clamp(1, 8)
        weights = best = velocity = torch.zeros_like(base)
        load = self._spread(base, tokens, weights)
        lowest = load.amax(2, keepdim=True)
        for iteration in range(iterations):
            momentum = min(MOMENTUM, iteration / (iteration + 3))
            velocity = momentum * velocity - step * (load / mean).clamp(0.1, 10).log()
            weights = weights + velocity
            # What no weight can fix drives weights apart for ever; only their differences mean something.
            weights = (weights - weights.mean(2, keepdim=True)).clamp(-RANGE, RANGE)
            load = self._spread(base, tokens, weights)
            peak = load.amax(2, keepdim=True)
            best = torch.where(peak < lowest, weights, best)
            lowest = torch.minimum(peak, lowest)
        return best

    def loads(self, counts: Tensor, weights: Tensor | None = None) -> Tensor:
        """float32 [layers, S, ranks] tokens of each rank. weights: None is the even split."""
        base, tokens = self._parts(counts)
        return self._spread(base, tokens, torch.zeros_like(base) if weights is None else weights)

    def _parts(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """[layers, S, ranks] tokens that cannot move, [layers, S, K] those of the experts that can."""
        layers, steps, _ = counts.shape
        counts = counts.float()
        fixed = counts.gather(2, self.placement[:, None].expand(-1, steps, -1)) * self.single
        tokens = counts.gather(2, self.experts[:, None].expand(-1, steps, -1)) * self.movable
        return fixed.view(layers, steps, self.links.shape[2], -1).sum(3), tokens

    def _spread(self, base: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        weights = weights.exp()
        return base + weights * ((tokens / (weights @ self.links.mT)) @ self.links)


# ---- the bound -----------------------------------------------------------------------------------------------------


def lp_bound(counts: NDArray[np.number], placement: NDArray[np.integer], ranks: int) -> float:
    """The least that the busiest rank of one layer can have in one step, by linear programming.

    counts: [experts] tokens. placement: [physical].

    Raises:
        ModuleNotFoundError: scipy is not installed; nothing else here needs it.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    counts = np.asarray(counts, dtype=np.float64)
    physical, experts = len(placement), len(counts)
    rank = np.arange(physical) // (physical // ranks)
    slot, one = np.arange(physical), np.ones(physical)
    # Unknowns: tokens of each physical expert, then the peak. Rows: a rank is at most at the peak; experts are served.
    peak = (np.full(ranks, -1.0), (np.arange(ranks), np.full(ranks, physical)))
    rows = (np.append(one, peak[0]), (np.append(rank, peak[1][0]), np.append(slot, peak[1][1])))
    below = coo_array(rows, shape=(ranks, physical + 1))
    served = coo_array((one, (placement, slot)), shape=(experts, physical + 1))
    solution = linprog(
        np.append(np.zeros(physical), 1), A_ub=below.tocsr(), b_ub=np.zeros(ranks), A_eq=served.tocsr(), b_eq=counts
    )
    return float(solution.fun)
