"""What Prometheus gets to see."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from deepinfer_plugin.speculative.calibration import Reliability
from deepinfer_plugin.speculative.export import COUNTERS, GAUGES, HISTOGRAMS, Exporter
from deepinfer_plugin.speculative.metrics import SpeculationMetrics

ROOT = Path(__file__).resolve().parents[2]


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
    metrics = SpeculationMetrics(5, Reliability())
    assert set(COUNTERS) == set(metrics.counters()) and set(GAUGES) == set(metrics.gauges(True))
    assert set(HISTOGRAMS) == set(metrics.histograms())


def test_counters_grow_by_what_was_added():
    registry, metrics = CollectorRegistry(), SpeculationMetrics(5, Reliability())
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
    assert value("planned_seconds_sum") == 2.0 and value("real_seconds_sum") == 1.0
    assert value("accept_length_sum") / value("accept_length_count") == 3.0
    assert value("profiled") == 1
    exporter.update(profiled=False)
    assert value("steps_total") == 4 and value("profiled") == 0


def samples(text):
    """{(name, le): value} of an exposition, names without their prefix; le None: the sample has no bucket."""
    found = re.findall(r'^deepinfer_spec_(\w+)(?:\{le="([^"]+)"\})? (\S+)$', text, re.MULTILINE)
    return {(name, edge or None): float(value) for name, edge, value in found}


# Requests accepted 1, 5 and 0 drafts: 2, 6 and 1 tokens. 11 rows planned and run, 0.5 s planned, 0.25 s taken.
PER_STEP = {
    "accept_length": {"1.0": 1, "2.0": 2, "5.0": 2, "6.0": 3, "+Inf": 3, "count": 3, "sum": 9},
    "planned_rows": {"8.0": 0, "16.0": 1, "+Inf": 1, "count": 1, "sum": 11},
    "real_rows": {"8.0": 0, "16.0": 1, "+Inf": 1, "count": 1, "sum": 11},
    "planned_seconds": {"0.256": 0, "0.512": 1, "+Inf": 1, "count": 1, "sum": 0.5},
    "real_seconds": {"0.128": 0, "0.256": 1, "+Inf": 1, "count": 1, "sum": 0.25},
}


def check(text, steps):
    found = samples(text)
    for name, expected in PER_STEP.items():
        assert f"# TYPE deepinfer_spec_{name} histogram\n" in text
        for part, value in expected.items():
            key = (f"{name}_{part}", None) if part in ("count", "sum") else (f"{name}_bucket", part)
            assert found[key] == steps * value, key
    assert found["steps_total", None] == steps


def test_histograms():
    registry, metrics = CollectorRegistry(), SpeculationMetrics(5, Reliability())
    exporter = Exporter(metrics, registry)
    check(generate_latest(registry).decode(), 0)
    for times in (1, 3):  # also several steps in one update
        observe(metrics, times)
        exporter.update(profiled=True)
    check(generate_latest(registry).decode(), 4)
    exporter.update(profiled=True)
    check(generate_latest(registry).decode(), 4)


def test_values_on_and_beyond_the_edges():
    """As ``Histogram.observe`` counts: an edge belongs to the bucket below it, the last bucket is open."""
    registry, metrics = CollectorRegistry(), SpeculationMetrics(5, Reliability())
    exporter = Exporter(metrics, registry)
    for seconds in (0.001, 0.0010001, 8.192, 1e9, 0.0):
        metrics.real_seconds.observe(seconds)
    exporter.update(profiled=True)
    found = samples(generate_latest(registry).decode())
    edges = {edge: count for (name, edge), count in found.items() if name == "real_seconds_bucket"}
    assert (edges["0.001"], edges["0.002"], edges["4.096"], edges["8.192"], edges["+Inf"]) == (2, 3, 3, 4, 5)
    assert list(edges) == sorted(edges, key=float) and len(edges) == len(metrics.real_seconds.counts)


def test_another_process_answers_the_scrape(tmp_path):
    """Two ranks as SGLang starts them: what they observe goes through files to the process that has the endpoint."""
    rank = (
        "from prometheus_client import REGISTRY\n"
        "from tests.speculative.test_worker_export import Exporter, Reliability, SpeculationMetrics, observe\n"
        "metrics = SpeculationMetrics(5, Reliability())\n"
        "exporter = Exporter(metrics)\n"
        "for times in (1, 2):\n"
        "    observe(metrics, times)\n"
        "    exporter.update(profiled=True)\n"
    )
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", rank], cwd=ROOT, env=environment, check=True, timeout=120)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    text = generate_latest(registry).decode()
    check(text, 6)
    assert samples(text)["profiled", None] == 1
    assert 'deepinfer_spec_accepted_total{position="1"} 12.0' in text
