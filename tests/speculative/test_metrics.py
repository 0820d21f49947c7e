from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer_plugin.speculative.acceptance import accept
from deepinfer_plugin.speculative.calibration import Reliability
from deepinfer_plugin.speculative.metrics import RequestFigures, SpeculationMetrics
from deepinfer_plugin.speculative.planner import allocate, survival

K = 5


def test_accept_length_of_an_oracle_drafter():
    """Drafts are the target's own greedy tokens, each spoilt with a chosen probability: 1 + .9 + .72 + ... = 3.578."""
    conditional = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5])
    expected = conditional.cumprod(0)
    assert 1 + float(expected.sum()) == pytest.approx(3.5776)
    torch.manual_seed(0)
    metrics, request = SpeculationMetrics(K, Reliability()), RequestFigures()
    survivals, _ = survival(conditional.expand(8, K))
    cu_rows = torch.arange(9) * (K + 1)
    for _ in range(5_000 // 8):
        chosen = torch.randint(0, 1000, (8, K + 1))
        spoilt = torch.rand(8, K) > conditional
        verdict = accept(chosen.flatten(), cu_rows, torch.where(spoilt, 1000, chosen[:, :K]))
        full, accepted = np.full(8, K), verdict.accepted.numpy()
        metrics.observe(full, full, accepted, survivals.numpy())
        metrics.reliability.observe(survivals.numpy(), full, accepted)
        request.add(K, K, int(accepted[0]))
    assert metrics.rounds == 5_000
    assert metrics.accept_length == pytest.approx(3.578, rel=0.02)
    counters, gauges = metrics.counters(), metrics.gauges(profiled=True)
    assert counters["drafted"] == counters["verified"] == [5_000] * K and counters["trimmed"] == [0] * K
    assert np.array(counters["accepted"]) / 5_000 == pytest.approx(expected.numpy(), abs=0.02)
    assert gauges["real_survival"] == pytest.approx(expected.tolist(), abs=0.02)
    assert gauges["predicted_survival"] == pytest.approx(expected.tolist(), abs=1e-4)
    assert gauges["calibration_error"] < 0.015
    assert request.rounds == 625 and request.accept_length == pytest.approx(3.578, rel=0.05)
    lengths = metrics.histograms()["accept_length"]
    assert lengths.counts.sum() == 5_000 and lengths.total == counters["emitted_tokens"]


def test_a_trimmed_draft_is_not_a_rejected_one():
    metrics = SpeculationMetrics(K, Reliability())
    metrics.observe(np.array([5, 5, 0]), np.array([2, 5, 0]), np.array([2, 1, 0]), np.full((3, K), 0.5), broken=2)
    counters = metrics.counters()
    assert counters["drafted"] == [2, 2, 2, 2, 2]
    assert counters["trimmed"] == [0, 0, 1, 1, 1]
    assert counters["verified"] == [2, 2, 1, 1, 1]
    assert counters["accepted"] == [2, 1, 0, 0, 0]
    assert counters["emitted_tokens"] == 6 and counters["rounds"] == 3 and counters["steps"] == 1
    assert counters["broken_confidences"] == 2
    assert metrics.gauges(True)["real_survival"] == [1.0, 0.5, 0.0, 0.0, 0.0]


def test_impossible_counts_are_refused():
    for drafted, verified, accepted in (([1], [2], [0]), ([2], [1], [2])):
        with pytest.raises(ValueError, match="accepted <= verified <= drafted"):
            SpeculationMetrics(K, Reliability()).observe(*map(np.array, (drafted, verified, accepted)), np.ones((1, K)))


def test_planned_and_real():
    metrics = SpeculationMetrics(K, Reliability())
    none = np.zeros((2, K))
    counts = np.array([5, 5]), np.array([1, 1]), np.array([1, 0])
    metrics.observe(*counts, none, planned_rows=4, planned_tokens=4.0, planned_seconds=0.010, real_seconds=0.012)
    metrics.observe(*counts, none)  # verify all: nothing was planned
    assert metrics.gauges(False) | {"profiled": 0.0, "tokens_real_over_planned": 0.75} == metrics.gauges(False)
    histograms = metrics.histograms()
    assert histograms["planned_seconds"].total == 0.010 and histograms["real_seconds"].total == 0.012
    assert histograms["planned_rows"].counts.sum() == 1 and histograms["real_rows"].counts.sum() == 2
    assert metrics.counters()["unplanned_steps"] == 1


def test_request_figures():
    request = RequestFigures()
    assert request.accept_length == 0
    request.add(drafted=5, verified=3, accepted=2)
    request.add(drafted=0, verified=0, accepted=0)
    assert request.as_meta() == {
        "spec_rounds": 2,
        "spec_drafted": 5,
        "spec_trimmed": 2,
        "spec_verified": 3,
        "spec_accepted": 2,
        "spec_accept_length": 2.0,
    }


def test_scheduled_rounds_add_up():
    torch.manual_seed(1)
    metrics = SpeculationMetrics(K, Reliability())
    for total in range(6, 37, 3):
        survivals, _ = survival(torch.rand(6, K))
        verified = allocate(survivals, total).numpy() - 1
        accepted = np.minimum(verified, np.random.default_rng(total).integers(0, 6, 6))
        metrics.observe(np.full(6, K), verified, accepted, survivals.numpy())
    counters = metrics.counters()
    drafted, trimmed, verified = (np.array(counters[name]) for name in ("drafted", "trimmed", "verified"))
    assert (drafted == trimmed + verified).all()
    assert verified.sum() == sum(total - 6 for total in range(6, 37, 3))
    assert (np.diff(counters["accepted"]) <= 0).all()
