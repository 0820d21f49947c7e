"""Experts move to where they balance the ranks, while the ranks serve.

The two sets of experts, the network's and the draft stages', are balanced apart: each has its own window of counts, its
own decisions and its own metrics. All happens between forwards, which all ranks begin alike, so everything counts
forwards and nothing a clock:

* every step of a set, its counts go into a ring on the device;
* every ``interval`` of them (the first time after a quarter of it) rank 0 has a decision worked out elsewhere;
* every ``CARRY`` forwards after that, rank 0 tells the others what has come of it, until there is an answer;
* then, forward by forward, a chunk of the migration, of one set at a time.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_plugin.model.expert_map import split_rounds
from deepinfer_plugin.model.layout import Layout
from deepinfer_plugin.model.moe import Experts
from deepinfer_plugin.model.network import Network
from deepinfer_plugin.model.parallel import Ranks
from deepinfer_plugin.runtime.memory_plan import WINDOW

from .decide import Decision, Request
from .metrics import BalanceMetrics
from .mover import Mover
from .solver import Solver, SolverFailed
from .window import Window

logger = logging.getLogger(__name__)

EARLY = 4  # the first decision comes after this part of an interval
CARRY = 16  # forwards between two questions whether rank 0 has decided
CHUNK_BYTES = 4 << 20  # at 5 GB/s, a slow link, 0.8 ms: 2 % of a step of 36 ms
LINK = 5e9  # bytes a second that a migration is taken to move at most: a GPU is done later than the call that asked
STEP_S = 0.042  # likewise


@dataclass(frozen=True)
class Terms:
    """interval: steps of a set between two decisions. chunk_bytes: what a rank sends, and receives, between two
    forwards at most."""

    interval: int
    chunk_bytes: int = CHUNK_BYTES


class Balancer:
    """On rank 0 also ``solver``, which makes what works out the decisions of one set; ``settled``, called when a
    migration is complete, with the layout in force; ``report``, called when metrics have changed."""

    def __init__(
        self,
        network: Network,
        terms: Terms,
        solver: Callable[[], Solver],
        settled: Callable[[Layout], object] = lambda layout: None,
        report: Callable[[], object] = lambda: None,
    ):
        assert isinstance(network.parallel, Ranks)
        self.network, self.ranks, self.settled, self.report = network, network.parallel, settled, report
        blocks: dict[str, Any] = dict(zip(network.expert_maps, (network.layers, network.mtp), strict=True))
        self.sets = {
            name: BalancedSet(name, [block.ffn.experts for block in layers], self.ranks, terms, solver)
            for name, layers in blocks.items()
            if len(layers)
        }

    def start(self) -> None:
        """Balance from the next forward on; all ranks start before the same one. Started already: go on."""
        if self.ranks.between is not None:
            return
        for each in self.sets.values():
            each.window.skip()
        self.ranks.between = self.between

    def between(self) -> None:
        """Before a forward, on every rank."""
        for each in self.sets.values():
            each.count()
        moving = next((each for each in self.sets.values() if each.mover.busy), None)
        if moving is not None:
            moving.move()
        decided = [each.decide() for each in self.sets.values()]
        if self.ranks.world.rank == 0 and (moving is not None or any(decided)):
            self.report()
            if moving is not None and not moving.mover.busy:
                maps = self.network.expert_maps
                self.settled(Layout(*(places.placement.copy() for places in maps.values())))


class BalancedSet:
    """One set. ``metrics`` are rank 0's."""

    def __init__(self, name: str, layers: list[Experts], ranks: Ranks, terms: Terms, solver: Callable[[], Solver]):
        self.name, self.places, self.group, self.interval = name, layers[0].map, ranks.world, terms.interval
        self.even_split = not split_rounds(layers[0].ops)
        self.window = Window(self.places, min(WINDOW, terms.interval))
        self.mover = Mover(layers, self.places, ranks.world, terms.chunk_bytes)
        self.solver = solver() if ranks.world.rank == 0 else None
        self.metrics = BalanceMetrics()
        self.next = max(1, terms.interval // EARLY)  # at this many steps
        self.waiting: int | None = None  # forwards since the question
        self.previous: NDArray[np.int64] | None = None  # the placement before the latest rebalance
        self.step_s: deque[float] = deque(maxlen=WINDOW)
        self.call_s: deque[float] = deque(maxlen=WINDOW)
        self.last_step = 0.0

    def count(self) -> None:
        if self.window.record():
            now = time.perf_counter()
            if self.last_step:
                self.step_s.append(now - self.last_step)
            self.last_step = now

    def move(self) -> None:
        begin = time.perf_counter()
        moved = self.mover.step()
        self.metrics.moved_bytes += moved
        seconds = time.perf_counter() - begin
        self.call_s.append(max(seconds, moved / LINK))
        self.metrics.stalled(seconds)
        if self.mover.busy:
            return
        if self.solver is not None:
            logger.info(
                "%s experts: rebalanced, no step waited longer than %.2g s", self.name, self.metrics.longest_stall
            )

    def decide(self) -> bool:
        """Ask when it is time and nothing moves, and hear what has come of it when that is due: whether there was an
        answer."""
        if self.waiting is None:
            if self.window.steps >= self.next and not self.mover.busy:
                self.next, self.waiting = self.window.steps + self.interval, 0
                if self.solver is not None:
                    self.solver.ask(self._question())
            return False
        self.waiting += 1
        if self.waiting % CARRY:
            return False
        found = self.group.from_first(self._answer())
        if found is None:
            return False
        self.waiting = None
        if isinstance(found, str):
            logger.error("%s experts stay where they are: %s", self.name, found)
            self.next = sys.maxsize
        else:
            self._begin(found)
        return True

    def _question(self) -> Callable[[], Request]:
        counts, mover = self.window.snapshot(), self.mover
        known = {
            "ranks": self.places.ranks,
            "current": self.places.placement.copy(),
            "previous": self.previous,
            "interval": self.interval,
            "step_s": float(np.median(self.step_s)) if self.step_s else STEP_S,
            "call_s": float(np.mean(self.call_s)) if self.call_s else min(mover.chunk_bytes, mover.expert_bytes) / LINK,
            "calls_per_round": mover.calls_per_round,
            "even_split": self.even_split,
        }
        return lambda: Request(counts=counts(), **known)

    def _answer(self) -> Decision | str | None:
        """What rank 0 has been answered, or why it never will be; the others' is not looked at."""
        try:
            return None if self.solver is None else self.solver.answer()
        except SolverFailed as error:
            return str(error)

    def _begin(self, found: Decision) -> None:
        metrics, moves = self.metrics, sum(map(len, found.rounds))
        metrics.decisions += 1
        metrics.balance = found.balance
        if found.real_gain is not None:
            metrics.real_gain = found.real_gain
        if not found.rounds:
            return
        metrics.rebalances += 1
        metrics.moved_experts += moves
        metrics.balance_before, metrics.balance_forecast = found.balance, found.forecast
        metrics.predicted_gain_seconds, metrics.predicted_cost_seconds = found.gain_s, found.cost_s
        self.previous = self.places.placement.copy()
        self.mover.begin(found.rounds)
        if self.solver is not None:
            logger.info(
                "%s experts: balance %.3f, forecast %.3f after %d moves in %d rounds; %.2g s to gain, %.2g s to pay",
                self.name,
                found.balance,
                found.forecast,
                moves,
                len(found.rounds),
                found.gain_s,
                found.cost_s,
            )
