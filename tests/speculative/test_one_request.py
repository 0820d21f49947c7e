"""One request on a machine that does other things too: rounds recorded there are planned again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deepinfer_plugin.speculative.planner import Planner
from deepinfer_plugin.speculative.step_cost import Curve, StepCost

RECORDED = json.loads((Path(__file__).parent / "one_request.json").read_text())
ROUNDS = np.array(RECORDED["rounds"] * 4)
CONTEXTS, RIGHT, SURVIVALS = ROUNDS[:, 0], ROUNDS[:, 1], (ROUNDS[:, 2:] / 1000).astype(np.float32)
FORWARD, BESIDE = np.array(RECORDED["forward"]), RECORDED["beside"]
BLOCK = SURVIVALS.shape[1]

# By round, how many times longer than alone everything takes.
MACHINES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "alone": lambda random: np.ones(len(ROUNDS)),
    "always slower": lambda random: np.full(len(ROUNDS), 1.7),
    "faster than when it was measured": lambda random: np.full(len(ROUNDS), 0.6),
    "now and then interrupted": lambda random: 1 + 0.3 * random.exponential(size=len(ROUNDS)),
    "busy for seconds": lambda random: 1 + 1.5 * (random.random(len(ROUNDS) // 30) < 0.4).repeat(30),
}


def rate(drafts: np.ndarray) -> float:
    """Tokens per second, alone on the machine, if so many drafts are verified."""
    return float((1 + np.minimum(drafts, RIGHT)).sum() / (FORWARD[drafts] + sum(BESIDE.values())).sum())


def planned(slower: np.ndarray) -> np.ndarray:
    """How many drafts the planner has verified, round by round."""
    planner = Planner(StepCost(Curve(**RECORDED["curve"], padded=False)), BLOCK)
    drafts = np.zeros(len(ROUNDS), dtype=int)
    for index, (context, survivals, times) in enumerate(zip(CONTEXTS, SURVIVALS, slower, strict=True)):
        verified = planner.plan(survivals[None], np.array([context]), newest=True).total - 1
        planner.cost.observe(1 + verified, 1, FORWARD[verified] * times, (1 + verified) * context, context)
        for name, seconds in BESIDE.items():
            getattr(planner.cost, name).observe(1, seconds * times)
        accepted = np.minimum([verified], RIGHT[index])
        planner.reliability.observe(survivals[None], np.array([verified]), accepted)
        drafts[index] = verified
    return drafts


@pytest.mark.parametrize("machine", MACHINES)
def test_no_fixed_number_of_drafts_is_much_faster(machine):
    fixed = max(rate(np.full(len(ROUNDS), drafts)) for drafts in range(BLOCK + 1))
    assert rate(planned(MACHINES[machine](np.random.default_rng(1)))) > 0.99 * fixed
