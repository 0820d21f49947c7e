"""The simulator is a benchmark, but its figures are only worth something if it still runs and orders what must be
ordered."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def sim():
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "dspark_sim.py"
    spec = importlib.util.spec_from_file_location("dspark_sim", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["dspark_sim"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["dspark_sim"]


def test_published_shape_and_bounds(sim):
    scenario = next(scenario for scenario in sim.SCENARIOS if scenario.name == "published")
    results = sim.sweep(scenario, (1, 60, 72), effort=0.2)
    for at in results.values():
        assert at["oracle"].rate >= at["ours"].rate
        assert at["ours"].rate > 0.97 * max(at["off"].rate, at["fixed 5"].rate, at["published"].rate)
    found = sim.figures({"published": results})
    assert found["gain_vs_fixed5_at_60"] == pytest.approx(0.054, abs=0.025)
    assert found["gain_vs_fixed5_at_72"] == pytest.approx(0.067, abs=0.025)
    assert 3.2 <= found["verified_mean"] <= 4.6 and found["accepted_mean"] == pytest.approx(3.2, abs=0.15)
    assert "ours / published" in sim.table(results) and sim.plot(results)


def test_context_price_pays_where_contexts_differ(sim):
    scenario = next(scenario for scenario in sim.SCENARIOS if scenario.name == "h200-mixed")
    at = sim.sweep(scenario, (32,), effort=0.2)[32]
    assert at["ours"].gain(at["published"])[0] > 0.03
