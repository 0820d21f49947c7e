"""From the confidence head's logits to survival probabilities that can be believed.

A confidence is the head's estimate that a draft is accepted if those before it are; the survival of draft j is the
product of the confidences of drafts 0..j. Two corrections, at the two ends: a per-position ``Calibration`` of the
logits, fitted offline and shipped beside a checkpoint, and ``Reliability``, learnt from what really survived.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..runtime.transfer import to_device

LOGIT_LIMIT = 60.0
FILE = "dspark_calibration.json"  # beside the weights


class CalibrationError(ValueError):
    """A calibration file means nothing; names the file, what it has and what is legal."""


@dataclass(frozen=True)
class Calibration:
    """How the confidence head's logits are to be read: sigmoid(logit / temperature + bias), by draft position.

    A temperature says how sure the head should be, a bias corrects how often it is right: a head that was trained on
    given text sees text of the network's own when serving, which is easier to foresee.
    """

    temperatures: tuple[float, ...]
    biases: tuple[float, ...]

    @classmethod
    def neutral(cls, block: int) -> Calibration:
        return cls((1.0,) * block, (0.0,) * block)

    @classmethod
    def read(cls, path: str | Path, block: int) -> Calibration:
        """``{"temperatures": [t0, ..], "biases": [b0, ..]}``, one of each per draft position; without biases they are
        0. CalibrationError for anything else."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            temperatures, biases = content["temperatures"], content.get("biases", [0.0] * block)
        except FileNotFoundError:
            raise CalibrationError(f"{path}: there is no such file of temperatures") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CalibrationError(
                f'{path}: expected {{"temperatures": [{block} numbers], "biases": [{block} numbers]}}, got {error!r}'
            ) from None
        if not _numbers(temperatures, block) or min(temperatures) <= 0:
            raise CalibrationError(f"{path}: temperatures must be {block} positive numbers, got {temperatures!r}")
        if not _numbers(biases, block):
            raise CalibrationError(f"{path}: biases must be {block} numbers, got {biases!r}")
        return cls(tuple(map(float, temperatures)), tuple(map(float, biases)))

    def confidences(self, logits: Tensor) -> Tensor:
        """float32 [B, K] -> probabilities float32 [B, K]. NaN stays NaN: ``planner.survival`` counts it."""
        both = np.array([self.temperatures, self.biases], dtype=np.float32)
        divisors, biases = to_device(both, logits.device)
        return torch.sigmoid((logits.float() / divisors + biases).clamp(-LOGIT_LIMIT, LOGIT_LIMIT))


def _numbers(values: Any, count: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        and all(math.isfinite(value) for value in values)
    )


def calibration_of(model_path: str | Path, file: str | None, block: int) -> Calibration:
    """From ``file``, or the checkpoint's own ``dspark_calibration.json``, or neutral if it has none.

    Raises:
        CalibrationError: the file is missing, though named, or means nothing.
    """
    own = Path(model_path) / FILE
    if file is None and not own.exists():
        return Calibration.neutral(block)
    return Calibration.read(file or own, block)


class Reliability:
    """What drafts of a predicted survival really did, in bins of the prediction, apart for requests that sample: the
    head foresees the network's choice, and a draw is harder to foresee.

    As a function it maps predictions to what was observed: an increasing map, so it never changes the order of two
    drafts of a kind, only how many are worth a row. Bins with little evidence stay near the prediction. Old evidence
    fades with new samples, not with steps, so one request and five hundred forget equally.
    """

    BINS = 16
    PRIOR = 20.0  # samples' worth of belief that a prediction is right
    MEMORY = 8192.0  # samples after which evidence has faded to 1/e
    STEPS = 1024  # the map is a table: a plan has microseconds

    def __init__(self) -> None:
        self.samples = np.zeros((2, self.BINS))  # of greedy requests, and of those that sample
        self.predicted = np.zeros((2, self.BINS))  # sums over the samples of a bin
        self.survived = np.zeros((2, self.BINS))
        self._map: NDArray[np.float64] | None = None

    def observe(
        self,
        survivals: NDArray[np.floating],
        verified: NDArray[np.integer],
        accepted: NDArray[np.integer],
        drawn: NDArray[np.bool_] | None = None,
    ) -> None:
        """survivals: [R, K] as predicted; verified, accepted: [R] drafts of each request; drawn: bool [R] whether it
        samples, None: none does."""
        position = np.arange(survivals.shape[1])
        seen = position < verified[:, None]
        predicted = survivals[seen]
        bins = np.minimum((predicted * self.BINS).astype(np.int64), self.BINS - 1)
        if drawn is not None:
            bins += self.BINS * np.broadcast_to(drawn[:, None], seen.shape)[seen]
        both = np.bincount(bins, minlength=2 * self.BINS).reshape(2, self.BINS)
        fade = np.exp(-both.sum(axis=1, keepdims=True) / self.MEMORY)
        for total, weights in (
            (self.samples, None),
            (self.predicted, predicted),
            (self.survived, (position < accepted[:, None])[seen]),
        ):
            total *= fade
            total += np.bincount(bins, weights, 2 * self.BINS).reshape(2, self.BINS)
        self._map = None

    @property
    def error(self) -> float:
        """Expected calibration error of survival: mean |predicted - real| over bins, weighted by samples."""
        count = self.samples.sum()
        return float(np.abs(self.predicted - self.survived).sum() / count) if count else 0.0

    def __call__(self, survivals: NDArray[np.floating], drawn: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        """Predictions in 0..1 -> what they are worth. 0 stays 0. Any shape; with ``drawn`` bool [R]: [R, K]."""
        if self._map is None:
            middle = (np.arange(self.BINS) + 0.5) / self.BINS
            weight = self.samples + self.PRIOR
            x = (self.predicted + self.PRIOR * middle) / weight
            y = (self.survived + self.PRIOR * middle) / weight
            grid = np.arange(self.STEPS + 1) / self.STEPS
            self._map = np.stack(
                [np.interp(grid, [0.0, *x[kind]], [0.0, *increasing(y[kind], weight[kind])]) for kind in (0, 1)]
            )
        steps = (survivals * self.STEPS + 0.5).astype(np.int32)
        return self._map[0, steps] if drawn is None else self._map[drawn[:, None].astype(np.int8), steps]


def increasing(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
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
