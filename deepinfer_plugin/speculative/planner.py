"""How many rows the next verification gets, and which drafts get them.

A request always verifies its anchor, the newest token, and may add a prefix of its drafts. A row costs time and earns,
on average, the survival of its draft: the chance that this draft and all before it are accepted. The plan maximises

    (requests + survival of the drafts taken) / seconds of a step with so many rows.

Two decisions, on two sides. The **total** is an integer the host needs before it can launch a step, so it is made
there (``Planner``, numpy) from confidences the host has already seen, those of the previous drafts. The **split** of
the total is made on the device from the confidences of the drafts at hand (``allocate``, torch), without a word from
the host.

Neither decision can change what is emitted: every emitted token is the network's own draw (``acceptance``). On a host
that has the newest confidences anyway both are made from those.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .calibration import Reliability
from .step_cost import StepCost

logger = logging.getLogger(__name__)

LAG = 2  # a plan may use the confidences of drafts made this many rounds ago, or earlier
CHARGE = 0.2  # of what a row's context costs, how much its draft must earn; docs/speculative.md: why not all of it
FEW = 16  # requests up to which the newest confidences are worth waiting for: more speak for each other


def survival(confidences: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [B, K] -> (survival float32 [B, K], how many confidences were NaN: int64 []).

    NaN counts as 0 and what lies outside 0..1 is clamped, so a row never increases: rounding is monotonic as long as
    products are made from left to right. A device's ``cumprod`` promises no order, hence the loop.
    """
    broken = confidences.isnan()
    survivals = torch.where(broken, 0, confidences).float().clamp_(0, 1)
    columns = survivals.unbind(dim=1)
    for before, own in pairwise(columns):
        own.mul_(before)
    return survivals, broken.sum()


def allocate(
    survivals: Tensor,
    total: int,
    limits: Tensor | None = None,
    contexts: Tensor | None = None,
    price: float | Tensor = 0.0,
) -> Tensor:
    """Split ``total`` verify rows: int64 [B] rows of each request, anchor included, on the device of ``survivals``.

    survivals: [B, K] of the newest drafts. total: at least B (ValueError). limits: int64 [B] most drafts a request
    may verify, 0 for one without drafts; None: K. contexts: [B] tokens a request attends to, and price: survival a
    row must bring per context token (``Plan.price``); None: all rows cost the same.

    The sum is ``total`` unless the limits do not allow so many. The best drafts win, ties go to the lower index.
    """
    count, block = survivals.shape
    if total < count:
        raise ValueError(f"total: {count} requests need a row each, got {total}")
    scores = survivals if contexts is None else survivals - price * contexts[:, None]
    if limits is not None:
        position = torch.arange(block, device=scores.device)
        scores = scores.masked_fill(position >= limits[:, None], -torch.inf)
    taken = scores.flatten().sort(descending=True, stable=True).indices[: total - count]
    owner = taken // block
    usable = torch.ones_like(owner) if limits is None else (taken % block < limits[owner]).long()
    return torch.ones(count, dtype=torch.int64, device=survivals.device).scatter_add_(0, owner, usable)


class LaggedSurvival:
    """What the host knows of survivals, by state slot: written when a copy from the device has arrived, read when a
    later round is planned."""

    def __init__(self, slots: int, block: int):
        self._values = np.zeros((2 * LAG, slots, block), dtype=np.float32)
        self._rounds = np.full((2 * LAG, slots), -1, dtype=np.int64)
        self._owners = np.zeros((2 * LAG, slots), dtype=np.int64)

    def record(
        self, round: int, slots: NDArray[np.integer], owners: NDArray[np.integer], survivals: NDArray[np.floating]
    ) -> None:
        """Survivals [R, K] of the drafts made in ``round``. owners: [R] anything that tells a slot's successive
        requests apart."""
        page = round % len(self._values)
        self._values[page, slots] = survivals
        self._rounds[page, slots] = round
        self._owners[page, slots] = owners

    def read(
        self,
        round: int,
        slots: NDArray[np.integer],
        owners: NDArray[np.integer],
        drafted: NDArray[np.bool_],
        finished: NDArray[np.bool_] | None = None,
        unknown: NDArray[np.floating] | float = 1.0,
    ) -> NDArray[np.float32]:
        """[R, K]: what a plan of ``round`` may use. A request without a record (it just came) counts as ``unknown``,
        a number or [K], if it has drafts (``drafted`` bool [R]) and 0 if not; one known to have ended since
        (``finished``) as 0."""
        page = (round - LAG) % len(self._values)
        known = (self._rounds[page, slots] == round - LAG) & (self._owners[page, slots] == owners)
        result = np.where(
            known[:, None], self._values[page, slots], drafted[:, None] * np.asarray(unknown, dtype=np.float32)
        )
        if finished is not None:
            result[finished] = 0
        return result


@dataclass(frozen=True)
class Plan:
    """One round's budget."""

    total: int  # verify rows, anchors included
    price: float  # for ``allocate``: survival a row must bring per token of its request's context
    tokens: float  # expected to be emitted; NaN if nothing was planned
    seconds: float  # the step is expected to take; NaN if its cost is not known
    advantage: float | None = None  # its tokens a second over those of a step without drafts; None without drafts


class Planner:
    """Chooses the total. Not thread-safe; one per rank."""

    def __init__(self, cost: StepCost, block: int):
        self.cost, self.block = cost, block
        self.reliability = Reliability()
        self.usual = np.full(block, 0.5)  # mean survival per position over recent rounds
        self._rate = 0.0  # tokens per second of the last plan: what a second is worth
        self._told = False

    def plan(
        self,
        survivals: NDArray[np.floating],
        contexts: NDArray[np.integer] | None = None,
        limits: NDArray[np.integer] | None = None,
        drawn: NDArray[np.bool_] | None = None,
        newest: bool = False,
    ) -> Plan:
        """survivals: [R, K] from ``LaggedSurvival.read``, R >= 1; newest: of the drafts at hand. contexts: int [R]
        tokens each request attends to; None: short. limits: int [R] most drafts a request may verify; None: K. drawn:
        bool [R] whether it samples; None: none does.

        The global maximum over all totals: step time is a staircase and may have bumps, so the first total that is
        worse than its predecessor says nothing.
        """
        count, block = survivals.shape
        slots = self._slots(count, limits)
        if not self.cost.profiled:
            return self._verify_all(count + slots)
        expected = self._expect(survivals, limits, drawn, newest)
        price = self._price(contexts)
        scores = expected - price * contexts[:, None] if contexts is not None and price else expected
        order = _descending(scores, limits)[:slots]
        seconds = self._seconds(count, slots, contexts)
        if contexts is not None:
            seconds[1:] += self.cost.row_context * contexts[order // block].cumsum()
        tokens = np.concatenate([[count], count + expected.ravel()[order].cumsum()])
        rates = tokens / seconds
        best = int(rates.argmax())
        self._rate = float(rates[best])
        advantage = self._advantage(count, slots, float(seconds[0]))
        return Plan(count + best, price, float(tokens[best]), float(seconds[best]), advantage)

    def _slots(self, count: int, limits: NDArray[np.integer] | None) -> int:
        return count * self.block if limits is None else int(np.minimum(limits, self.block).sum())

    def _price(self, contexts: NDArray[np.integer] | None) -> float:
        if contexts is None or not self.cost.context_split_known:
            return 0.0
        return CHARGE * self._rate * self.cost.row_context

    def _advantage(self, count: int, slots: int, anchors: float) -> float | None:
        """Of the plan just made, where verifying and drafting for anchors alone takes ``anchors`` seconds."""
        return self._rate * (anchors - self.cost.drafting(count)) / count if slots else None

    def _seconds(self, count: int, slots: int, contexts: NDArray[np.integer] | None) -> NDArray[np.float64]:
        """By drafts taken, what attending to contexts costs the anchors included."""
        attended = 0 if contexts is None else contexts.sum()
        anchors = (self.cost.request_context + self.cost.row_context) * attended
        return self.cost.steps(count, count + slots) + anchors

    def _expect(
        self,
        survivals: NDArray[np.floating],
        limits: NDArray[np.integer] | None = None,
        drawn: NDArray[np.bool_] | None = None,
        newest: bool = False,
    ) -> NDArray[np.float64]:
        """What the drafts at hand will survive, judged by the previous ones of the same requests if not by themselves.

        Few requests are a poor sample, and the best guess lies between what they just had and what is usual: the
        usual counts as one request more. Many requests speak for themselves.
        """
        expected = self.reliability(survivals, drawn)
        drafted = expected if limits is None else expected[limits > 0]
        if len(drafted):
            self.usual += 0.01 * (drafted.mean(axis=0) - self.usual)
        return expected if newest else expected + (self.usual - expected) / (len(expected) + 1)

    def _verify_all(self, total: int) -> Plan:
        if not self._told:
            logger.warning("speculation is unprofiled, verify all: %s", self.cost.why_unprofiled)
            self._told = True
        return Plan(total, 0.0, np.nan, np.nan)


def _descending(scores: NDArray[np.floating], limits: NDArray[np.integer] | None) -> NDArray[np.intp]:
    """Flat indices, best score first, ties to the lower index, what is beyond a limit last. Scores are compared in
    steps of 1/32000 between -1 and 1, which decides no total and lets numpy sort by radix, several times faster."""
    keys = (scores.clip(-1, 1) * -32_000).astype(np.int16)
    if limits is not None:
        keys[np.arange(scores.shape[1]) >= limits[:, None]] = np.iinfo(np.int16).max
    return np.argsort(keys, axis=None, kind="stable")
