"""What Prometheus gets to see of the balancer."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry

from deepinfer_plugin.eplb.export import COUNTERS, GAUGES, Exporter
from deepinfer_plugin.eplb.metrics import BalanceMetrics


def test_every_number_is_exported_for_each_set():
    target, draft, registry = BalanceMetrics(), BalanceMetrics(), CollectorRegistry()
    assert set(COUNTERS) == set(target.counters()) and set(GAUGES) == set(target.gauges())
    exporter = Exporter({"target": target, "draft": draft}, registry)

    def value(name, experts="target", **labels):
        return registry.get_sample_value(f"deepinfer_eplb_{name}", {"experts": experts, **labels})

    exporter.update()
    for total in (1, 3):
        target.rebalances, target.moved_bytes, target.balance = total, 1000 * total, 0.5 + total / 10
        target.stalled(0.003)
        exporter.update()
    assert (value("rebalances_total"), value("moved_bytes_total"), value("balance")) == (3, 3000, 0.8)
    assert value("stall_seconds_sum") == pytest.approx(0.006) and value("longest_stall") == 0.003
    assert value("stall_seconds_bucket", le="0.00256") == 0 and value("stall_seconds_bucket", le="0.00512") == 2
    assert value("rebalances_total", "draft") == 0 and value("stall_seconds_count", "draft") == 0
