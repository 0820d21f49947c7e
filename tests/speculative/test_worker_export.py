"""Totals in Prometheus."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry

from deepinfer_plugin.speculative.export import COUNTERS, GAUGES, TOTALS, Exporter
from deepinfer_plugin.speculative.metrics import SpeculationMetrics


def observe(metrics, times):
    for _ in range(times):
        metrics.observe(
            np.array([5, 5, 0]),
            np.array([3, 5, 0]),
            np.array([1, 5, 0]),
            np.full((3, 5), 0.5),
            broken=2,
            planned_rows=11,
            planned_tokens=9.0,
            planned_seconds=0.5,
            real_seconds=0.25,
        )


def test_every_number_is_exported():
    metrics = SpeculationMetrics(5)
    assert set(COUNTERS) == set(metrics.counters()) and set(GAUGES) == set(metrics.gauges(True))
    assert set(TOTALS) <= set(metrics.histograms())


def test_counters_grow_by_what_was_added():
    registry, metrics = CollectorRegistry(), SpeculationMetrics(5)
    exporter = Exporter(metrics, registry)

    def value(name, **labels):
        return registry.get_sample_value(f"deepinfer_spec_{name}", labels)

    for times in (1, 3):
        observe(metrics, times)
        exporter.update(profiled=True)
    assert value("steps_total") == 4 and value("rounds_total") == 12 and value("emitted_tokens_total") == 36
    assert [value("drafted_total", position=str(p)) for p in (1, 5)] == [8, 8]
    assert [value("trimmed_total", position=str(p)) for p in (1, 4, 5)] == [0, 4, 4]
    assert [value("verified_total", position=str(p)) for p in (1, 4)] == [8, 4]
    assert [value("accepted_total", position=str(p)) for p in (1, 2)] == [8, 4]
    assert value("broken_confidences_total") == 8 and value("unplanned_steps_total") == 0
    assert value("planned_seconds_total") == 2.0 and value("real_seconds_total") == 1.0
    assert value("profiled") == 1 and value("accept_length") == 3.0
    exporter.update(profiled=False)
    assert value("steps_total") == 4 and value("profiled") == 0
