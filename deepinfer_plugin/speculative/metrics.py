"""What speculation did, in numbers: pure accounting on host arrays, fed once a round, read by whoever exports it.

Four counters must not be confused. **drafted**: proposed by the head. **trimmed**: drafted, but not worth a row of the
next verification. **verified**: drafted and given a row. **accepted**: verified and right. drafted = trimmed +
verified; a trimmed draft is not a rejected one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import isfinite, nan

import numpy as np
from numpy.typing import NDArray

from .calibration import Reliability


@dataclass
class RequestFigures:
    """One request's share, for its ``meta_info`` and ``usage``."""

    rounds: int = 0
    drafted: int = 0
    trimmed: int = 0
    verified: int = 0
    accepted: int = 0

    def add(self, drafted: int, verified: int, accepted: int) -> None:
        """One round: drafts proposed, given a row, found right."""
        self.rounds += 1
        self.drafted += drafted
        self.trimmed += drafted - verified
        self.verified += verified
        self.accepted += accepted

    @property
    def accept_length(self) -> float:
        """Tokens per round, the target's own included; 0 before the first."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0

    def as_meta(self) -> dict[str, float]:
        counts = {f"spec_{item.name}": getattr(self, item.name) for item in fields(self)}
        return {**counts, "spec_accept_length": round(self.accept_length, 4)}


@dataclass
class Distribution:
    """A histogram with fixed upper edges; the last bucket is open."""

    edges: tuple[float, ...]
    counts: NDArray[np.int64] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = np.zeros(len(self.edges) + 1, dtype=np.int64)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[np.searchsorted(self.edges, value)] += times
        self.total += value * times


STEP_SECONDS = tuple(1e-3 * 2**n for n in range(14))  # 1 ms .. 8 s
STEP_ROWS = tuple(float(2**n) for n in range(13))  # 1 .. 4096


class SpeculationMetrics:
    """Totals over all requests of one rank.

    rounds counts request-rounds: one request in one verification. All ``*_at`` arrays are per draft position.
    reliability: what is known of how true predictions are; only read here.
    """

    def __init__(self, block: int, reliability: Reliability):
        self.block, self.reliability = block, reliability
        self.steps = 0
        self.rounds = 0
        self.emitted = 0
        self.drafted_at, self.trimmed_at, self.verified_at, self.accepted_at = (
            np.zeros(block, dtype=np.int64) for _ in range(4)
        )
        self.predicted_at = np.zeros(block)  # sum of predicted survival over verified drafts
        self.broken_confidences = 0
        self.unplanned_steps = 0  # verified all, because the step cost is not known
        self.accept_lengths = Distribution(tuple(float(n) for n in range(1, block + 2)))
        self.planned_rows, self.real_rows = Distribution(STEP_ROWS), Distribution(STEP_ROWS)
        self.planned_seconds, self.real_seconds = Distribution(STEP_SECONDS), Distribution(STEP_SECONDS)
        self.expected_tokens = 0.0  # what plans promised, over planned steps
        self.tokens_when_expected = 0

    def observe(
        self,
        drafted: NDArray[np.integer],
        verified: NDArray[np.integer],
        accepted: NDArray[np.integer],
        survivals: NDArray[np.floating],
        broken: int = 0,
        planned_rows: int = 0,
        planned_tokens: float = nan,
        planned_seconds: float = nan,
        real_seconds: float = nan,
    ) -> None:
        """One verification of R requests.

        drafted, verified, accepted: int [R] drafts, each at most the one before. survivals: [R, K] as predicted for
        these drafts. broken: confidences that were NaN. The rest is the plan (``Plan``) and what the step took;
        NaN: not known.
        """
        if (accepted > verified).any() or (verified > drafted).any():
            raise ValueError("accepted <= verified <= drafted does not hold")
        position = np.arange(self.block)
        seen = position < verified[:, None]
        self.steps += 1
        self.rounds += len(drafted)
        self.emitted += len(drafted) + int(accepted.sum())
        self.drafted_at += (position < drafted[:, None]).sum(axis=0)
        self.trimmed_at += (~seen & (position < drafted[:, None])).sum(axis=0)
        self.verified_at += seen.sum(axis=0)
        self.accepted_at += (position < accepted[:, None]).sum(axis=0)
        self.predicted_at += np.where(seen, survivals, 0).sum(axis=0)
        self.broken_confidences += broken
        for length, times in enumerate(np.bincount(accepted, minlength=self.block + 1)):
            self.accept_lengths.observe(length + 1.0, int(times))
        self.real_rows.observe(float(len(drafted) + verified.sum()))
        if planned_rows:
            self.planned_rows.observe(planned_rows)
        if isfinite(planned_seconds):
            self.planned_seconds.observe(planned_seconds)
        else:
            self.unplanned_steps += 1
        if isfinite(planned_tokens):
            self.expected_tokens += planned_tokens
            self.tokens_when_expected += len(drafted) + int(accepted.sum())
        if isfinite(real_seconds):
            self.real_seconds.observe(real_seconds)

    @property
    def accept_length(self) -> float:
        """Mean tokens per request-round, the target's own included; 0 before the first."""
        return self.emitted / self.rounds if self.rounds else 0.0

    def counters(self) -> dict[str, int | list[int]]:
        """Ever-growing; a list has one entry per draft position."""
        return {
            "steps": self.steps,
            "rounds": self.rounds,
            "emitted_tokens": self.emitted,
            "drafted": self.drafted_at.tolist(),
            "trimmed": self.trimmed_at.tolist(),
            "verified": self.verified_at.tolist(),
            "accepted": self.accepted_at.tolist(),
            "broken_confidences": self.broken_confidences,
            "unplanned_steps": self.unplanned_steps,
        }

    def gauges(self, profiled: bool) -> dict[str, float | list[float]]:
        """profiled: ``StepCost.profiled``. Survivals are of verified drafts, so a position that is rarely verified
        shows the drafts that were thought worth it, not all."""
        seen = np.maximum(self.verified_at, 1)
        return {
            "profiled": float(profiled),
            "predicted_survival": (self.predicted_at / seen).tolist(),
            "real_survival": (self.accepted_at / seen).tolist(),
            "calibration_error": self.reliability.error,
            "tokens_real_over_planned": self.tokens_when_expected / self.expected_tokens
            if self.expected_tokens
            else nan,
        }

    def histograms(self) -> dict[str, Distribution]:
        return {
            "accept_length": self.accept_lengths,
            "planned_rows": self.planned_rows,
            "real_rows": self.real_rows,
            "planned_seconds": self.planned_seconds,
            "real_seconds": self.real_seconds,
        }
