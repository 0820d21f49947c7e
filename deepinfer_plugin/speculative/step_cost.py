"""What a step of so many rows costs: measured at start, cached on disk, corrected while serving, never guessed."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer_plugin.cache import write_whole

from .calibration import increasing

logger = logging.getLogger(__name__)

FLAT = 0.01  # a curve that rises by less than this fraction says nothing about the price of a row
FORMAT = 1


@dataclass(frozen=True)
class Curve:
    """Seconds of one step at some row counts, with a short context.

    padded: a step runs at the next measured count (captured graphs), so time is a staircase; else the counts are
    samples of a smooth curve (eager). Beyond the last count: along the line through the last two, never falling.
    row_context, request_context: seconds per context token that each row, or each request whatever its rows, adds;
    None: not measured.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    padded: bool
    row_context: float | None = None
    request_context: float | None = None

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        if not self.rows or len(self.rows) != len(self.seconds) or not ascending or self.rows[0] < 1:
            raise ValueError(f"a curve needs ascending row counts from 1 and as many timings, got {self.rows}")
        if not all(np.isfinite(second) and second > 0 for second in self.seconds):
            raise ValueError(f"a curve needs positive timings, got {self.seconds}")

    @property
    def flat(self) -> bool:
        return max(self.seconds) <= min(self.seconds) * (1 + FLAT)

    def at(self, rows: NDArray[np.integer]) -> NDArray[np.float64]:
        """Seconds at these row counts."""
        known, seconds = np.array(self.rows), np.array(self.seconds)
        inside = seconds[np.searchsorted(known, rows).clip(max=len(known) - 1)]
        if not self.padded:
            inside = np.interp(rows, known, seconds)
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])) if len(known) > 1 else 0.0
        return inside + slope * np.maximum(rows - known[-1], 0)

    def table(self) -> str:
        """The curve as text: a line per row count with its time, the price of a row since the line before, a bar."""
        widest = max(self.seconds)
        lines = [f"{'rows':>6} {'ms':>9} {'us/row':>9}"]
        for index, (rows, second) in enumerate(zip(self.rows, self.seconds, strict=True)):
            step = (second - self.seconds[index - 1]) / (rows - self.rows[index - 1]) if index else second / rows
            lines.append(f"{rows:>6} {second * 1e3:>9.3f} {step * 1e6:>9.1f}  {'#' * round(40 * second / widest)}")
        if self.row_context is not None and self.request_context is not None:
            lines.append(
                f"per 1000 tokens of context: {self.row_context * 1e9:.3f} us a row, "
                f"{self.request_context * 1e9:.3f} us a request"
            )
        return "\n".join(lines)

    def plot(self, width: int = 72, height: int = 16) -> str:
        """The curve as a text plot, time over rows, at the resolution of characters."""
        columns = np.linspace(1, self.rows[-1], width)
        values = self.at(np.ceil(columns).astype(np.int64))
        top = values.max()
        level = np.ceil(values / top * height).astype(int)
        lines = [
            f"{top * 1e3 * line / height:>9.2f} |" + "".join("#" if filled >= line else " " for filled in level)
            for line in range(height, 0, -1)
        ]
        axis = [" " * 10 + "+" + "-" * width, f"{'rows':>10} 1{self.rows[-1]:>{width - 1}}"]
        return "\n".join([f"{'ms':>9}", *lines, *axis])


def trimmed_mean(seconds: Sequence[float]) -> float:
    """Without the fastest and the slowest, if there are at least three."""
    kept = sorted(seconds)[1:-1] if len(seconds) > 2 else list(seconds)
    return sum(kept) / len(kept)


def measure(run: Callable[[int], float], rows: Sequence[int], padded: bool, repeats: int = 5, warmup: int = 1) -> Curve:
    """run(row count) performs one step and returns its seconds.

    All row counts take turns, so that whatever else runs meanwhile meets all of them. More rows never make an eager
    step faster; where they seem to, the neighbours share a mean. A captured step may well be.
    """
    timings = [[run(count) for count in rows] for _ in range(warmup + repeats)][warmup:]
    means = np.array([trimmed_mean(each) for each in zip(*timings, strict=True)])
    if not padded:
        means = increasing(means, np.ones(len(means)))
    return Curve(tuple(rows), tuple(means.tolist()), padded)


def measure_context(
    curve: Curve, run: Callable[[int, int, int], float], rows: int, block: int, context: int, repeats: int = 5
) -> Curve:
    """The curve with the price of context, from one long and one wide batch of equally many rows.

    run(row count, rows per request, context tokens) performs one step. rows: a multiple of block + 1.
    """
    base = float(curve.at(np.array([rows]))[0])
    wide, deep = (
        trimmed_mean([run(rows, each, context) for _ in range(repeats)]) - base for each in (1, block + 1)
    )  # rows requests of one row; rows / (block + 1) requests of block + 1 rows
    requests = rows // (block + 1)
    request = max(0.0, (wide - deep) / ((rows - requests) * context))
    row = max(0.0, wide / (rows * context) - request)
    return replace(curve, row_context=row, request_context=request)


class SideCost:
    """What a step of so many sequences costs beside what the curve says, in seconds unless said otherwise: the median
    of what was observed for that number, or for any until there is enough; 0 before the first observation."""

    WINDOW, ENOUGH, WINDOW_ALL = 9, 5, 256

    def __init__(self) -> None:
        self._own: dict[int, deque[float]] = {}
        self._all: deque[float] = deque(maxlen=self.WINDOW_ALL)

    def __call__(self, sequences: int) -> float:
        own = self._own.get(sequences, ())
        window = own if len(own) >= self.ENOUGH else self._all
        return float(np.median(window)) if window else 0.0

    def observe(self, sequences: int, seconds: float) -> None:
        self._own.setdefault(sequences, deque(maxlen=self.WINDOW)).append(seconds)
        self._all.append(seconds)


class StepCost:
    """The curve, and what serving has taught since about rows, context length, sampling and drafting.

    The curve is measured with short contexts, a request a row, and is the forward alone. What a real forward took
    beyond it is booked on the step and on its drafts where contexts are short, and on the tokens attended to, by every
    row or once per request, where they are long: the noise of a step, divided by few tokens, would be a price of tokens
    that means nothing. Time that does not depend on rows matters as much: the more of it, the more a step should carry.
    """

    WINDOW, ENOUGH, REFIT = 256, 16, 32  # steps kept, needed, and between two fits
    SPREAD = 0.5  # rows per request must vary by this much before rows and requests can be told apart
    NEAR = 4  # steps apart: what else the machine does meets neighbours alike, and steps of another minute do not
    LONG = 1024  # tokens a request, on average: from here on a step says something about context
    FARTHEST = 4.0  # times dearer or cheaper than the curve says is as far as a row's price goes

    def __init__(self, curve: Curve | None):
        self.curve = curve
        self.row_context = (curve and curve.row_context) or 0.0  # seconds per row and context token
        self.request_context = (curve and curve.request_context) or 0.0  # seconds per request and context token
        self.context_split_known = curve is not None and curve.row_context is not None
        self._table = np.zeros(0)
        self._steps: deque[tuple[float, float]] = deque(maxlen=self.WINDOW)  # of long contexts
        self._short: deque[tuple[int, float, float]] = deque(maxlen=self.WINDOW)
        self._observed = 0
        self.draft_price = 1.0  # of a draft's row, times what the curve says
        self.anchors = SideCost()  # seconds that a forward of anchors alone takes beyond the curve
        self.sampling, self.drafting, self.between = SideCost(), SideCost(), SideCost()

    @property
    def profiled(self) -> bool:
        """False: there is no curve, or a flat one, and every draft is verified. A gauge."""
        return self.curve is not None and not self.curve.flat

    @property
    def why_unprofiled(self) -> str:
        return "no step-cost curve" if self.curve is None else "the step-cost curve is flat, rows look free"

    def steps(self, least: int, most: int) -> NDArray[np.float64]:
        """Seconds of steps of ``least`` requests and least..most rows without context: the forward, sampling, drafting,
        and what passes until the next one can start."""
        beside = self.sampling(least) + self.drafting(least) + self.between(least)
        return self._forward(least, most) + beside

    def _forward(self, least: int, most: int) -> NDArray[np.float64]:
        assert self.curve is not None
        if len(self._table) <= most:
            self._table = self.curve.at(np.arange(2 * most + 1))
        anchors = float(self._table[least])
        return anchors + self.anchors(least) + self.draft_price * (self._table[least : most + 1] - anchors)

    def observe(self, rows: int, requests: int, seconds: float, row_tokens: int, request_tokens: int) -> None:
        """The forward of a verification of ``rows`` rows of ``requests`` requests took ``seconds``. row_tokens: context
        tokens summed over rows; request_tokens: summed over requests."""
        if self.curve is None:
            return
        self._observed += 1
        if request_tokens < self.LONG * requests:
            seconds -= self.row_context * row_tokens + self.request_context * request_tokens
            anchors, measured = self.curve.at(np.array([requests, rows]))
            self._short.append((requests, measured - anchors, seconds))
            if self._observed % self.REFIT == 0:
                self._fit_rows()
            beyond = seconds - anchors - self.draft_price * (measured - anchors)
            self.anchors.observe(requests, max(beyond, -0.9 * anchors))
            return
        beyond = seconds - float(self._forward(requests, rows)[-1])
        self._steps.append((row_tokens / request_tokens, beyond / request_tokens))
        if len(self._steps) >= self.ENOUGH and self._observed % self.REFIT == 0:
            self._fit_context()

    def _fit_rows(self) -> None:
        """By what seconds rise where the curve does, between neighbouring steps of as many requests."""
        assert self.curve is not None
        requests, rise, seconds = np.array(self._short).T
        slopes = self._slopes(rise, seconds, FLAT * self.curve.seconds[0], requests)
        if len(slopes) >= self.ENOUGH:
            price = self._forced(self.draft_price, slopes)
            self.draft_price = float(np.clip(price, 1 / self.FARTHEST, self.FARTHEST))

    def _fit_context(self) -> None:
        """beyond / request_tokens = request_context + row_context * (rows per request, weighted by context).

        Medians all the way: the slope is the median over pairs of neighbouring steps (Theil-Sen), the rest a median of
        residuals. Where rows per request hardly vary, the two cannot be told apart: a split known before is kept, and
        without one everything is booked on rows, which sizes the total as if rows were to blame but ranks nobody.
        """
        depth, excess = np.array(self._steps).T
        slopes = self._slopes(depth, excess, self.SPREAD)
        if len(slopes) >= self.ENOUGH:
            known = self._forced(self.row_context, slopes) if self.context_split_known else float(np.median(slopes))
            self.row_context = max(0.0, known)
            self.context_split_known = True
        elif not self.context_split_known:
            self.row_context = max(0.0, float(np.median(excess / depth)))
        self.request_context = max(0.0, float(np.median(excess - self.row_context * depth)))

    def _forced(self, known: float, slopes: NDArray[np.float64]) -> float:
        """What was known, moved only as far as evidence forces it: to two standard errors from the median of
        ``slopes``, by a sign test."""
        error = 1 / np.sqrt(len(slopes) / self.NEAR)  # neighbours' pairs share steps
        low, high = np.quantile(slopes, [max(0.0, 0.5 - error), min(1.0, 0.5 + error)])
        return float(np.clip(known, low, high))

    def _slopes(
        self, x: NDArray[np.float64], y: NDArray[np.float64], least: float, kinds: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """dy / dx of pairs of neighbouring steps, of one kind, that differ by at least ``least``."""
        found = []
        for apart in range(1, self.NEAR + 1):
            run, rise = x[apart:] - x[:-apart], y[apart:] - y[:-apart]
            useful = abs(run) >= least
            if kinds is not None:
                useful &= kinds[apart:] == kinds[:-apart]
            found.append(rise[useful] / run[useful])
        return np.concatenate(found)


@dataclass(frozen=True)
class CurveCache:
    """Curves on disk, a file per key; ``key`` names everything a timing depends on (model, device, parallel layout,
    version). A file that is too old, damaged or of another key is as good as none."""

    directory: Path
    key: Mapping[str, str]
    max_age: float = 24 * 3600.0  # seconds

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(json.dumps(dict(self.key), sort_keys=True).encode()).hexdigest()
        return self.directory / f"step_cost_{digest[:16]}.json"

    def load(self) -> Curve | None:
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if stored["format"] != FORMAT or stored["key"] != dict(self.key):
                raise ValueError("made by another version or for another setup")
            age = time.time() - stored["made"]
            curve = Curve(
                tuple(stored["rows"]),
                tuple(stored["seconds"]),
                stored["padded"],
                stored["row_context"],
                stored["request_context"],
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("ignoring step-cost file %s: %s", self.path, error)
            return None
        return curve if 0 <= age <= self.max_age else None

    def store(self, curve: Curve) -> None:
        """Readers see the old file or the new one, never half of one. A directory that cannot be written is logged
        and costs a measurement at the next start."""
        content = {"format": FORMAT, "key": dict(self.key), "made": time.time(), **curve.__dict__}
        try:
            write_whole(self.path, json.dumps(content))
        except OSError as error:
            logger.warning("cannot store the step-cost curve in %s: %s", self.directory, error)
