"""``BalanceMetrics`` in SGLang's Prometheus endpoint: ``deepinfer_eplb_*``, for each set of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer_plugin.speculative.export import Growth

from .metrics import STALL_SECONDS, BalanceMetrics

COUNTERS = {
    "decisions": "Windows of steps that were looked at.",
    "rebalances": "Decisions to move experts.",
    "moved_experts": "Experts that were to move.",
    "moved_bytes": "Bytes of experts that travelled.",
}
GAUGES = {
    "balance": "Mean rank's rows over the busiest rank's in the latest window: 1 is perfect.",
    "balance_before": "The same in the window that led to the latest rebalance.",
    "balance_forecast": "What that rebalance was to make of it.",
    "predicted_gain_seconds": "Seconds that the latest rebalance was to save until the next decision.",
    "predicted_cost_seconds": "Seconds that it was to cost.",
    "real_gain": "Share of the busiest rank's rows that it has saved since.",
    "longest_stall": "Seconds that a step has waited longest for experts that moved.",
}
STALLS = "Seconds that steps waited for experts that moved."


class Exporter:
    """Brings a registry's metrics up to date with the totals, whenever called. One per server: rank 0's."""

    def __init__(self, sets: Mapping[str, BalanceMetrics], registry: Any = None):
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        self.sets = sets
        options: dict[str, Any] = {"registry": registry or REGISTRY}
        self.counters = {
            name: Counter(f"deepinfer_eplb_{name}", text, ["experts"], **options) for name, text in COUNTERS.items()
        }
        self.gauges = {
            name: Gauge(f"deepinfer_eplb_{name}", text, ["experts"], multiprocess_mode="mostrecent", **options)
            for name, text in GAUGES.items()
        }
        self.stalls = Histogram("deepinfer_eplb_stall_seconds", STALLS, ["experts"], buckets=STALL_SECONDS, **options)
        self.growth = Growth()

    def update(self) -> None:
        for experts, metrics in self.sets.items():
            for name, value in metrics.counters().items():
                self.counters[name].labels(experts).inc(self.growth((name, experts), value))
            for name, value in metrics.gauges().items():
                self.gauges[name].labels(experts).set(value)
            self.growth.tell(self.stalls.labels(experts), ("stalls", experts), metrics.stalls)
