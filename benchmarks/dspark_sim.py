"""Which verify-length policy is fastest: a simulator of decoding rounds, without a model.

    python benchmarks/dspark_sim.py [--json FILE] [--plot] [--quick] [--only CURVE]

Given a step-cost curve and a model of acceptance it keeps a number of requests running and compares, in tokens per
second: no speculation, a fixed number of drafts, a static threshold on survival, the early-stopping greedy algorithm
of the DSpark paper, its practice (total from the previous drafts' confidences, global maximum, newest confidences for
ranking), ours (the package's own ``Planner`` and ``allocate``), and two bounds: a total from the newest confidences,
which only a host that waits for them can have, and an oracle that knows which drafts are right.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_plugin.speculative.planner import FEW, Planner, allocate
from deepinfer_plugin.speculative.step_cost import Curve, StepCost, measure_context

BLOCK = 5
LOADS = (1, 2, 4, 8, 16, 32, 60, 72, 96, 128)
CAPTURED = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 801, 32))
CHURN = 1 / 200  # chance that a request's slot is taken over by a fresh one, per round
NOISE = 0.02  # of measured step times
BLOCKS = 20  # of a run, to estimate its error
WARMUP = 0.1  # part of a run that is not counted

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


# ---------------------------------------------------------------------------------------------------------- scenarios


@dataclass(frozen=True)
class Scenario:
    """A machine and a load. Context prices are seconds per token, for each row and for each request."""

    name: str
    about: str
    curve: Curve
    row_context: float = 0.0
    request_context: float = 0.0
    contexts: tuple[int, ...] = (4_000,)  # dealt out to requests in turn
    distortion: tuple[float, float] = (1.0, 0.0)  # logit reported = a * logit + b
    visible: bool = False  # the host has the newest confidences before it launches a step

    def seconds(self, rows: int, row_tokens: float, request_tokens: float) -> float:
        base = float(self.curve.at(np.array([rows]))[0])
        return base + self.row_context * row_tokens + self.request_context * request_tokens


def staircase(rows: Sequence[int], seconds: Callable[[int], float], padded: bool = True) -> Curve:
    return Curve(tuple(rows), tuple(seconds(count) for count in rows), padded)


def through(points: dict[int, float]) -> Callable[[int], float]:
    """Milliseconds at some row counts -> seconds at any, by straight lines."""
    known, values = np.array([*points]), np.array([*points.values()]) * 1e-3
    return lambda rows: float(
        np.interp(rows, known, values) + max(0, rows - known[-1]) * (values[-1] - values[-2]) / (known[-1] - known[-2])
    )


# One decode step of one of eight H200 (expert and data parallel), put together from kernel timings on one H200: routed
# experts, dense layers, attention, mHC, casts, head, plus an estimate for dispatch and combine. "stock": the best
# kernels available today, context apart; "floor": what bytes and operations allow.
STOCK = through({1: 11.0, 8: 15.8, 64: 22.0, 128: 25.5, 256: 32.5, 512: 48.3})
FLOOR = through({1: 4.5, 8: 7.0, 64: 10.5, 128: 11.5, 256: 13.2, 512: 18.0})
STOCK_ROW_CONTEXT = 3.2e-9  # indexer scoring: 256 rows of 32,000 tokens take 26 ms over all scoring layers
FLOOR_ROW_CONTEXT = 5e-11
MIXED = (4_000, 4_000, 16_000, 100_000)
PUBLISHED = staircase(range(4, 801, 4), lambda rows: 20e-6 * (720 + rows))

SCENARIOS = (
    Scenario("published", "a row costs 1/720 of the fixed part; captured every 4 rows", PUBLISHED),
    Scenario("published-over", "the same, the head overconfident", PUBLISHED, distortion=(1.4, 0.5)),
    Scenario("published-under", "the same, the head underconfident", PUBLISHED, distortion=(0.7, -0.4)),
    Scenario("h200-stock", "today's kernels, context 4k", staircase(CAPTURED, STOCK), STOCK_ROW_CONTEXT),
    Scenario("h200-mixed", "today's kernels, 4k to 100k", staircase(CAPTURED, STOCK), STOCK_ROW_CONTEXT, 0.0, MIXED),
    Scenario("h200-floor", "ideal kernels, 4k to 100k", staircase(CAPTURED, FLOOR), FLOOR_ROW_CONTEXT, 0.0, MIXED),
    Scenario("h200-shared", "context read once a request", staircase(CAPTURED, STOCK), 0.0, 8e-9, MIXED),
    Scenario("powers", "captured at powers of two only", staircase([2**n for n in range(11)], STOCK)),
    Scenario(
        "bump",
        "a kernel change makes 96 to 160 rows slower than 192",
        staircase(CAPTURED, lambda rows: STOCK(rows) * (1.25 if 96 <= rows <= 160 else 1.0)),
    ),
    Scenario(
        "cpu",
        "a row costs a third of the fixed part",
        staircase((1, 800), lambda n: 1e-3 * (3 + n), False),
        visible=True,
    ),
    Scenario(
        "cpu-blocks",
        "a second row is dear, the next six are cheap",
        staircase(
            (1, 2, 8, 9, 16, 17, 32, 800),
            through({1: 10, 2: 14, 8: 16, 9: 20, 16: 23, 17: 27, 32: 34, 800: 600}),
            False,
        ),
        visible=True,
    ),
)


# --------------------------------------------------------------------------------------------------------- acceptance


class World:
    """What drafts of ``requests`` requests are worth, wherever in their texts they stand.

    A draft j tokens ahead of the anchor at t is right with the probability sigmoid(depth_j + topic + word + luck): a
    slowly changing topic and an unpredictable word belong to position t + j of the text, so a new draft of a hard
    word is hard again; luck belongs to the block drafted at t. The head knows that probability: it is calibrated
    unless the scenario distorts it. All of it, coins included, is a function of position, so policies are compared
    on the same texts.
    """

    DEPTH = (2.45, 1.95, 1.6, 1.4, 1.2)
    TOPIC, WORD, LUCK, INERTIA = 1.2, 1.5, 0.5, 0.97

    def __init__(self, requests: int, rounds: int, seed: int):
        random = np.random.default_rng(seed)
        self.requests, self.length = requests, rounds * (BLOCK + 1)
        shape = (requests, self.length + BLOCK)
        topic = np.empty(shape)
        topic[:, 0] = random.standard_normal(requests)
        steps = random.standard_normal(shape) * math.sqrt(1 - self.INERTIA**2)
        for position in range(1, shape[1]):
            topic[:, position] = self.INERTIA * topic[:, position - 1] + steps[:, position]
        text = self.TOPIC * topic + self.WORD * random.standard_normal(shape)
        luck = self.LUCK * random.standard_normal((requests, self.length, BLOCK), dtype=np.float32)
        ahead = np.arange(self.length)[:, None] + np.arange(BLOCK)
        self.probabilities = 1 / (1 + np.exp(-(np.array(self.DEPTH, dtype=np.float32) + luck + text[:, ahead])))
        coins = random.random((requests, self.length, BLOCK), dtype=np.float32)
        self.right = (coins < self.probabilities).cumprod(axis=2, dtype=np.int8).sum(axis=2, dtype=np.int64)
        self.rows = np.arange(requests)

    def confidences(self, positions: Ints) -> Floats:
        return self.probabilities[self.rows, positions]

    def accepted(self, positions: Ints) -> Ints:
        """[R] drafts that would be accepted if all were verified."""
        return self.right[self.rows, positions]


# ----------------------------------------------------------------------------------------------------------- policies


@dataclass
class Round:
    """What policies may look at. ``right`` is for the oracle alone."""

    newest: Floats  # [R, K] survival of the drafts at hand
    lagged: Floats  # [R, K] of the previous drafts
    contexts: Ints  # [R]
    right: Ints  # [R] how many drafts would be accepted


class Policy:
    """Given a round, how many drafts each request verifies. Learns from ``learn`` what became of it."""

    def __init__(self, scenario: Scenario, requests: int):
        self.scenario, self.requests = scenario, requests
        self.base = scenario.curve.at(np.arange(requests, requests * (BLOCK + 1) + 1))

    def choose(self, now: Round) -> Ints:
        raise NotImplementedError

    def learn(self, now: Round, verified: Ints, accepted: Ints, seconds: float) -> None:
        pass

    def seconds(self, contexts: Ints) -> Floats:
        """Of a step by drafts verified, as if all contexts were average."""
        rows = self.requests + np.arange(len(self.base))
        each = contexts.mean() * self.scenario.row_context
        return self.base + each * rows + self.scenario.request_context * contexts.sum()

    def best_total(self, survivals: Floats, contexts: Ints) -> int:
        tokens = self.requests + np.concatenate([[0.0], np.sort(survivals, axis=None)[::-1].cumsum()])
        return int((tokens / self.seconds(contexts)).argmax())

    def split(self, survivals: Floats, drafts: int) -> Ints:
        taken = np.argsort(-survivals, axis=None, kind="stable")[:drafts]
        return np.bincount(taken // BLOCK, minlength=self.requests)


class Fixed(Policy):
    drafts = 0

    def choose(self, now: Round) -> Ints:
        return np.full(self.requests, self.drafts)


class Threshold(Policy):
    least = 0.5

    def choose(self, now: Round) -> Ints:
        return (now.newest >= self.least).sum(axis=1)


class EarlyStop(Policy):
    """Take drafts by survival while each one still raises tokens per second."""

    def choose(self, now: Round) -> Ints:
        tokens = self.requests + np.concatenate([[0.0], np.sort(now.newest, axis=None)[::-1].cumsum()])
        rates = tokens / self.seconds(now.contexts)
        worse = np.nonzero(rates[1:] <= rates[:-1])[0]
        return self.split(now.newest, int(worse[0]) if len(worse) else now.newest.size)


class Practice(Policy):
    def choose(self, now: Round) -> Ints:
        return self.split(now.newest, self.best_total(now.lagged, now.contexts))


class Newest(Policy):
    def choose(self, now: Round) -> Ints:
        return self.split(now.newest, self.best_total(now.newest, now.contexts))


class Ours(Policy):
    """The package's planner, with a cost it measures and corrects from noisy step times."""

    def __init__(self, scenario: Scenario, requests: int):
        super().__init__(scenario, requests)
        self.random = np.random.default_rng(requests)

        def run(rows: int, each: int, context: int) -> float:
            return self.timed(scenario.seconds(rows, rows * context, rows // each * context))

        curve = measure_context(scenario.curve, run, rows=48, block=BLOCK, context=32_000)
        self.planner = Planner(StepCost(curve), BLOCK)

    def timed(self, seconds: float) -> float:
        return seconds * (1 + NOISE * float(self.random.standard_normal()))

    def choose(self, now: Round) -> Ints:
        newest = torch.from_numpy(now.newest)
        if self.scenario.visible and self.requests <= FEW:
            plan = self.planner.plan(now.newest, now.contexts, newest=True)
        else:
            plan = self.planner.plan(now.lagged, now.contexts)
        return allocate(newest, plan.total, contexts=torch.from_numpy(now.contexts), price=plan.price).numpy() - 1

    def learn(self, now: Round, verified: Ints, accepted: Ints, seconds: float) -> None:
        self.planner.reliability.observe(now.newest, verified, accepted)
        row_tokens = int(((1 + verified) * now.contexts).sum())
        rows, request_tokens = self.requests + int(verified.sum()), int(now.contexts.sum())
        self.planner.cost.observe(rows, self.requests, self.timed(seconds), row_tokens, request_tokens)


class Oracle(Policy):
    """Verifies only drafts that are right, and of those as many as the price of a second allows."""

    rate = 0.0

    def choose(self, now: Round) -> Ints:
        right = (np.arange(BLOCK) < now.right[:, None]).astype(float)
        value = self.rate * self.scenario.row_context * now.contexts
        worth = np.sort((right - value[:, None]) * (right > 0), axis=None)[::-1]
        gains = self.requests + np.concatenate([[0.0], worth.cumsum()])
        drafts = int((gains - self.rate * self.base if self.rate else gains / self.base).argmax())
        return self.split((right - value[:, None]) * (right > 0), drafts)

    def learn(self, now: Round, verified: Ints, accepted: Ints, seconds: float) -> None:
        rate = (self.requests + int(accepted.sum())) / seconds
        self.rate += (rate - self.rate) * (0.02 if self.rate else 1.0)


def variant(kind: type[Policy], **values: float) -> type[Policy]:
    return type(kind.__name__, (kind,), values)


POLICIES: dict[str, type[Policy]] = {
    "off": Fixed,
    **{f"fixed {drafts}": variant(Fixed, drafts=drafts) for drafts in range(1, BLOCK + 1)},
    **{f"survival >= {least}": variant(Threshold, least=least) for least in (0.3, 0.5, 0.7)},
    "early stop": EarlyStop,
    "published": Practice,
    "ours": Ours,
    "newest": Newest,
    "oracle": Oracle,
}


# ---------------------------------------------------------------------------------------------------------- the rounds


@dataclass
class Result:
    """Means over a run; ``rates`` tokens per second of its blocks. Lengths count the anchor and the target's token."""

    rates: Floats
    rate: float
    verified: float  # rows per request and round
    accepted: float  # tokens per request and round
    by_context: dict[int, float] = field(default_factory=dict)  # tokens per second of a request of each context

    def gain(self, other: Result) -> tuple[float, float]:
        """Over another run: fraction, and its standard error."""
        ratios = self.rates / other.rates
        return self.rate / other.rate - 1, float(ratios.std(ddof=1) / math.sqrt(len(ratios)))


def simulate(scenario: Scenario, world: World, rounds: int, policy: Policy) -> Result:
    requests = world.requests
    random = np.random.default_rng(requests)
    contexts = np.resize(np.array(scenario.contexts), requests).astype(np.int64)
    positions = np.zeros(requests, dtype=np.int64)
    previous = np.ones((requests, BLOCK))
    scale, shift = scenario.distortion
    start = int(rounds * WARMUP)
    tokens, seconds, rows, emitted = np.zeros(rounds), np.zeros(rounds), np.zeros(rounds), np.zeros(requests)
    for step in range(rounds):
        truth = world.confidences(positions)
        reported = truth
        if scenario.distortion != (1.0, 0.0):
            reported = 1 / (1 + np.exp(-(scale * np.log(truth / (1 - truth)) + shift)))
        right = world.accepted(positions)
        survivals = reported.cumprod(axis=1)
        fresh = random.random(requests) < CHURN
        now = Round(survivals, np.where(fresh[:, None], 1.0, previous), contexts, right)
        verified = policy.choose(now)
        accepted = np.minimum(verified, right)
        count = requests + int(verified.sum())
        seconds[step] = scenario.seconds(count, float(((1 + verified) * contexts).sum()), float(contexts.sum()))
        tokens[step], rows[step] = requests + accepted.sum(), count
        if step >= start:
            emitted += 1 + accepted
        policy.learn(now, verified, accepted, float(seconds[step]))
        previous = survivals
        positions = positions + accepted + 1
    tokens, seconds, rows = tokens[start:], seconds[start:], rows[start:]
    edges = np.linspace(0, len(tokens), BLOCKS + 1).astype(int)[:-1]
    measured = rounds - start
    return Result(
        rates=np.add.reduceat(tokens, edges) / np.add.reduceat(seconds, edges),
        rate=float(tokens.sum() / seconds.sum()),
        verified=float(rows.sum() / requests / measured),
        accepted=float(tokens.sum() / requests / measured),
        by_context={int(c): float(emitted[contexts == c].mean() / seconds.sum()) for c in np.unique(contexts)},
    )


def sweep(scenario: Scenario, loads: Sequence[int], effort: float) -> dict[int, dict[str, Result]]:
    results: dict[int, dict[str, Result]] = {}
    for requests in loads:
        rounds = int(max(500, 16_000 // requests) * effort)
        world = World(requests, rounds, seed=requests)
        results[requests] = {
            name: simulate(scenario, world, rounds, kind(scenario, requests)) for name, kind in POLICIES.items()
        }
    return results


# ----------------------------------------------------------------------------------------------------------- reporting


def table(results: dict[int, dict[str, Result]]) -> str:
    loads = [*results]
    lines = ["policy".ljust(18) + "".join(f"{load:>8}" for load in loads) + "   requests"]
    for name in POLICIES:
        gains = [results[load][name].gain(results[load]["fixed 5"])[0] for load in loads]
        lines.append(name.ljust(18) + "".join(f"{100 * gain:>+8.1f}" for gain in gains) + "   % over fixed 5")
    compared = [results[load]["ours"].gain(results[load]["published"]) for load in loads]
    lines.append("ours / published".ljust(18) + "".join(f"{100 * gain:>+8.1f}" for gain, _ in compared) + "   %")
    lines.append("  standard error".ljust(18) + "".join(f"{100 * error:>8.1f}" for _, error in compared) + "   %")
    for label, what in (("rows, ours", "verified"), ("tokens, ours", "accepted")):
        values = [getattr(results[load]["ours"], what) for load in loads]
        lines.append(label.ljust(18) + "".join(f"{value:>8.2f}" for value in values) + "   a request and round")
    values = [results[load]["fixed 5"].accepted for load in loads]
    lines.append("tokens, fixed 5".ljust(18) + "".join(f"{value:>8.2f}" for value in values))
    return "\n".join(lines)


def plot(results: dict[int, dict[str, Result]], height: int = 15, width: int = 6) -> str:
    """Gain over fixed 5 by load, a letter per policy."""
    shown = {"o": "off", "e": "early stop", "p": "published", "U": "ours", "*": "oracle"}
    points = {
        letter: [100 * results[load][name].gain(results[load]["fixed 5"])[0] for load in results]
        for letter, name in shown.items()
    }
    top, bottom = max(max(p) for p in points.values()), max(-40.0, min(min(p) for p in points.values()))
    canvas = [[" "] * (width * len(results)) for _ in range(height)]
    for offset, (letter, values) in enumerate(points.items()):
        for column, value in enumerate(values):
            line = round((top - max(value, bottom)) / (top - bottom) * (height - 1))
            canvas[line][column * width + offset] = letter
    lines = [f"{top - (top - bottom) * i / (height - 1):>+7.1f} % |" + "".join(row) for i, row in enumerate(canvas)]
    axis = " " * 11 + "".join(str(load).ljust(width) for load in results)
    return "\n".join([*lines, axis, "  ".join(f"{letter} {name}" for letter, name in shown.items())])


def figures(results: dict[str, dict[int, dict[str, Result]]]) -> dict[str, float]:
    found: dict[str, float] = {}
    if "published" in results:
        at = results["published"]
        for load in (60, 72):
            found[f"gain_vs_fixed5_at_{load}"] = at[load]["ours"].gain(at[load]["fixed 5"])[0]
        found["verified_mean"] = (at[60]["ours"].verified + at[72]["ours"].verified) / 2
        found["accepted_mean"] = (at[60]["ours"].accepted + at[72]["ours"].accepted) / 2
    gains = [at["ours"].gain(at["published"])[0] for sweep in results.values() for at in sweep.values()]
    found["gain_vs_published_policy_min"], found["gain_vs_published_policy_max"] = min(gains), max(gains)
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", action="store_true", help="gain over fixed 5 by load, as text")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds: for a look, not for figures")
    parser.add_argument("--only", metavar="CURVE", choices=[scenario.name for scenario in SCENARIOS])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for scenario in SCENARIOS:
        if arguments.only in (None, scenario.name):
            found = results[scenario.name] = sweep(scenario, LOADS, 0.1 if arguments.quick else 1.0)
            print(f"\n{scenario.name}: {scenario.about}\n{table(found)}", flush=True)
            if len(scenario.contexts) > 1:
                for name in ("off", "published", "ours"):
                    speeds = ", ".join(f"{c // 1000}k {speed:.1f}" for c, speed in found[60][name].by_context.items())
                    print(f"tokens/s of a request by context, 60 requests, {name}: {speeds}")
            if arguments.plot:
                print("\n" + plot(found))
    summary = figures(results)
    print("\n" + "\n".join(f"{name:<32} {value:+.4f}" for name, value in summary.items()))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(summary, file, indent=2)


if __name__ == "__main__":
    main()
