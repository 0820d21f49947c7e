"""Which drafts the next verification gets rows for: the planner's decisions, fed and applied batch by batch.

Nothing here waits for the device. The number of rows is planned from confidences of two rounds ago, which have long
arrived, and for a few requests on a CPU, where everything is on the host, from the newest; the split is made on the
device from the newest. What a verification found is read when SGLang has its result on the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_plugin.model.parallel import Parallel, Single

from ..runtime.transfer import to_device, to_host
from .calibration import Calibration
from .metrics import SpeculationMetrics
from .pause import Pause
from .planner import FEW, LAG, LaggedSurvival, Plan, Planner, allocate, survival
from .step_cost import StepCost
from .verify import VerifyRows


class Moment:
    """A point in the device's work, to be asked only for points that have passed."""

    def __init__(self, device: torch.device | str):
        self.event, self.seconds = None, 0.0
        if torch.device(device).type == "cpu":
            self.seconds = time.perf_counter()
        else:
            self.event = torch.get_device_module(device).Event(enable_timing=True)
            self.event.record()

    def until(self, later: Moment) -> float:
        """Seconds."""
        if self.event is None:
            return later.seconds - self.seconds
        return self.event.elapsed_time(later.event) / 1e3


@dataclass
class Round:
    """One verification, from its plan until its result is on the host."""

    plan: Plan
    rows: VerifyRows
    limits: NDArray[np.int64]  # [B] drafts each request had to offer
    contexts: NDArray[np.int64]  # [B] tokens each request attends to
    drawn: NDArray[np.bool_]  # [B] whether it samples
    survivals: Tensor  # float32 [B, K] on the host, as are
    lengths: Tensor  # the rows given to each request, int64 [B]
    drafts: bool  # whether the round ends with drafts for the next one
    start: Moment
    verified: Moment | None = None
    sampled: Moment | None = None
    end: Moment | None = None


@dataclass
class Arrival:
    """Confidences on their way to the host."""

    round: int
    slots: NDArray[np.int64]
    owners: NDArray[np.int64]
    survivals: Tensor  # float32 [R, K]
    broken: Tensor  # int64 [], NaNs among them


class Schedule:
    """``slots`` state slots of requests that draft ``block`` tokens a round, unless drafting does not pay
    (``drafts``)."""

    def __init__(
        self,
        cost: StepCost,
        slots: int,
        block: int,
        device: torch.device | str,
        calibration: Calibration | None = None,
        parallel: Parallel | None = None,
    ):
        self.parallel = parallel or Single()
        self.block, self.device = block, device
        self.planner = Planner(cost, block)
        self.metrics = SpeculationMetrics(block, self.planner.reliability)
        self.calibration = calibration or Calibration.neutral(block)
        self.on_host = torch.device(device).type == "cpu"
        self.pause = Pause(LAG)
        self.drafts = True
        self.newest = torch.zeros(slots, block, device=device)  # survivals of the drafts at hand
        self.at_hand = np.zeros(slots, dtype=bool)  # whether there are any
        self.lagged = LaggedSurvival(slots, block)
        self.round = 0
        # Prefills without a decode step in between advance no round, and only the last few matter.
        self.arriving: deque[Arrival] = deque(maxlen=64)
        self.running: deque[Round] = deque()
        self.last_end: Moment | None = None  # of the round learned from before

    def drafted(self, slots: Tensor, host_slots: Sequence[int], owners: Sequence[int], logits: Tensor | None) -> None:
        """Confidences of new drafts: raw logits float32 [B, K], None from a checkpoint without a confidence head,
        whose drafts count as certain. ``owners`` tell successive requests of a slot apart."""
        if logits is None:
            found, broken = torch.ones(len(host_slots), self.block, device=self.device), torch.tensor(0)
        else:
            found, broken = survival(self.calibration.confidences(logits))
        self.newest[slots] = found
        arrival = Arrival(self.round, np.array(host_slots), np.array(owners), to_host(found), to_host(broken))
        self.arriving.append(arrival)
        self.at_hand[host_slots] = True

    def skipped(self, host_slots: Sequence[int]) -> None:
        """Nothing was drafted for these."""
        self.at_hand[host_slots] = False

    def rows(
        self,
        slots: Tensor,
        host_slots: Sequence[int],
        owners: Sequence[int],
        limits: list[int],
        contexts: list[int],
        drawn: list[bool],
    ) -> VerifyRows:
        """Rows of the next verification. limits: drafts each request may verify, 0 .. block; contexts: about how many
        tokens each attends to; drawn: whether it samples."""
        self.round += 1
        while self.arriving and self.arriving[0].round <= self.round - LAG:
            known = self.arriving.popleft()
            self.lagged.record(known.round, known.slots, known.owners, known.survivals.numpy())
            self.metrics.broken_confidences += int(known.broken)
        most, attended = np.where(self.at_hand[host_slots], limits, 0), np.array(contexts)
        samples = np.array(drawn)
        survivals = self.newest[slots]
        sees_newest = self.on_host and len(host_slots) <= FEW
        if sees_newest:
            plan = self.planner.plan(survivals.numpy(), attended, most, samples, newest=True)
        else:
            # A request that just came is given the benefit of the doubt; after a pause nobody is.
            unknown = self.planner.usual if self.pause.paused else 1.0
            lagged = self.lagged.read(self.round, np.array(host_slots), np.array(owners), most > 0, unknown=unknown)
            plan = self.planner.plan(lagged, attended, most, samples)
        self.drafts = self.pause.after(plan.advantage, sees_newest, len(host_slots))
        lengths = allocate(
            survivals,
            plan.total,
            to_device(most, self.device),
            to_device(attended, self.device),
            plan.price,
        )
        # The cost of a step is what each rank's own clock says, so the ranks of a group may have planned differently.
        total, self.drafts = self.parallel.agree((plan.total, self.drafts))
        plan, lengths = replace(plan, total=total), self.parallel.agree_tensor(lengths)
        rows = VerifyRows(lengths, plan.total, self.block + 1)
        on_host = (to_host(survivals), to_host(lengths))
        self.running.append(Round(plan, rows, most, attended, samples, *on_host, self.drafts, Moment(self.device)))
        return rows

    def verified(self) -> None:
        """The forward of the newest round has been launched."""
        self.running[-1].verified = Moment(self.device)

    def sampled(self) -> None:
        """Acceptance of the newest round has been launched."""
        self.running[-1].sampled = Moment(self.device)

    def ended(self) -> None:
        """Everything of the newest round has been launched, drafting included."""
        self.running[-1].end = Moment(self.device)

    def learn(self, accepted: Sequence[int]) -> None:
        """The oldest round's result is on the host: right drafts of each request [B]."""
        done = self.running.popleft()
        assert done.verified is not None and done.sampled is not None and done.end is not None
        survivals, verified, right = done.survivals.numpy(), done.lengths.numpy() - 1, np.array(accepted)
        forward, cost, contexts = done.start.until(done.verified), self.planner.cost, done.contexts
        count, row_tokens = len(contexts), int(((verified + 1) * contexts).sum())
        cost.observe(done.rows.total, count, forward, row_tokens, int(contexts.sum()))
        cost.sampling.observe(count, done.verified.until(done.sampled))
        if done.drafts:
            cost.drafting.observe(count, done.sampled.until(done.end))
        if self.last_end is not None:  # a prefill or nothing to do may lie between, which a median does not mind
            cost.between.observe(count, max(0.0, self.last_end.until(done.start)))
        self.last_end = done.end
        self.planner.reliability.observe(survivals, verified, right, done.drawn)
        self.metrics.observe(
            done.limits,
            verified,
            right,
            survivals,
            planned_rows=done.plan.total,
            planned_tokens=done.plan.tokens,
            planned_seconds=done.plan.seconds,
            real_seconds=done.start.until(done.end) + cost.between(count),
        )
