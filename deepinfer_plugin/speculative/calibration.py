"""From the confidence head's logits to survival probabilities that can be believed.

A confidence is the head's estimate that a draft is accepted if those before it are; the survival of draft j is the
product of the confidences of drafts 0..j. Two corrections, at the two ends: per-position ``Temperatures`` on the
logits, fitted offline and shipped beside a checkpoint, and ``Reliability``, learnt from what really survived.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LOGIT_LIMIT = 60.0


class CalibrationError(ValueError):
    """A temperature file means nothing; names the file, what it has and what is legal."""


@dataclass(frozen=True)
class Temperatures:
    """One positive divisor per draft position for the confidence head's logits."""

    values: tuple[float, ...]

    @classmethod
    def neutral(cls, block: int) -> Temperatures:
        return cls((1.0,) * block)

    @classmethod
    def read(cls, path: str | Path, block: int) -> Temperatures:
        """``{"temperatures": [t0, ..]}``, one per draft position. CalibrationError for anything else."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))["temperatures"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CalibrationError(f'{path}: expected {{"temperatures": [{block} numbers]}}, got {error!r}') from None
        numbers = isinstance(values, list) and all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in values
        )
        if not numbers or len(values) != block or not all(math.isfinite(value) and value > 0 for value in values):
            raise CalibrationError(f"{path}: temperatures must be {block} positive numbers, got {values!r}")
        return cls(tuple(float(value) for value in values))

    def confidences(self, logits: Tensor) -> Tensor:
        """float32 [B, K] -> probabilities float32 [B, K]. NaN stays NaN: ``planner.survival`` counts it."""
        divisors = torch.tensor(self.values, dtype=torch.float32, device=logits.device)
        return torch.sigmoid((logits.float() / divisors).clamp(-LOGIT_LIMIT, LOGIT_LIMIT))


class Reliability:
    """What drafts of a predicted survival really did, in bins of the prediction.

    As a function it maps predictions to what was observed: an increasing map, so it never changes the order of two
    drafts, only how many are worth a row. Bins with little evidence stay near the prediction. Old evidence fades
    with new samples, not with steps, so one request and five hundred forget equally.
    """

    BINS = 16
    PRIOR = 20.0  # samples' worth of belief that a prediction is right
    MEMORY = 8192.0  # samples after which evidence has faded to 1/e
    STEPS = 1024  # the map is a table: a plan has microseconds

    def __init__(self) -> None:
        self.samples = np.zeros(self.BINS)
        self.predicted = np.zeros(self.BINS)  # sums over the samples of a bin
        self.survived = np.zeros(self.BINS)
        self._map: NDArray[np.float64] | None = None

    def observe(
        self, survivals: NDArray[np.floating], verified: NDArray[np.integer], accepted: NDArray[np.integer]
    ) -> None:
        """survivals: [R, K] as predicted; verified, accepted: [R] drafts of each request."""
        position = np.arange(survivals.shape[1])
        seen = position < verified[:, None]
        predicted = survivals[seen]
        bins = np.minimum((predicted * self.BINS).astype(np.int64), self.BINS - 1)
        fade = math.exp(-len(predicted) / self.MEMORY)
        for total, weights in (
            (self.samples, None),
            (self.predicted, predicted),
            (self.survived, (position < accepted[:, None])[seen]),
        ):
            total *= fade
            total += np.bincount(bins, weights, self.BINS)
        self._map = None

    @property
    def error(self) -> float:
        """Expected calibration error of survival: mean |predicted - real| over bins, weighted by samples."""
        count = self.samples.sum()
        return float(np.abs(self.predicted - self.survived).sum() / count) if count else 0.0

    def __call__(self, survivals: NDArray[np.floating]) -> NDArray[np.float64]:
        """Predictions in 0..1, any shape -> what they are worth. 0 stays 0."""
        if self._map is None:
            middle = (np.arange(self.BINS) + 0.5) / self.BINS
            weight = self.samples + self.PRIOR
            x = (self.predicted + self.PRIOR * middle) / weight
            y = _increasing((self.survived + self.PRIOR * middle) / weight, weight)
            grid = np.arange(self.STEPS + 1) / self.STEPS
            self._map = np.interp(grid, np.concatenate([[0.0], x]), np.concatenate([[0.0], y]))
        return self._map[(survivals * self.STEPS + 0.5).astype(np.int32)]


def _increasing(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The non-decreasing sequence nearest to ``values`` by weighted squares: neighbours out of order share a mean."""
    means: list[float] = []
    masses: list[float] = []
    lengths: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        length = 1
        while means and means[-1] > value:
            value = (value * weight + means[-1] * masses[-1]) / (weight + masses[-1])
            weight += masses.pop()
            length += lengths.pop()
            means.pop()
        means.append(value)
        masses.append(weight)
        lengths.append(length)
    return np.repeat(means, lengths)
