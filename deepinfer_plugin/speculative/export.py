"""``SpeculationMetrics`` in SGLang's Prometheus endpoint: ``deepinfer_spec_*``, per draft position where it says so."""

from __future__ import annotations

from typing import Any

from .metrics import SpeculationMetrics

COUNTERS = {
    "steps": "Verifications.",
    "rounds": "Requests in verifications.",
    "emitted_tokens": "Tokens emitted by verifications.",
    "drafted": "Drafts proposed, by position.",
    "trimmed": "Drafts that were not worth a row of the next verification, by position.",
    "verified": "Drafts that were given a row, by position.",
    "accepted": "Drafts that were verified and right, by position.",
    "broken_confidences": "Confidences that were NaN and counted as 0.",
    "unplanned_steps": "Verifications of every draft, because the cost of a step is not known.",
}
GAUGES = {
    "profiled": "1 if the cost of a step is known, 0 if every draft is verified.",
    "accept_length": "Mean tokens a request gets from a verification.",
    "predicted_survival": "Mean survival predicted for verified drafts, by position.",
    "real_survival": "Share of verified drafts that were accepted, by position.",
    "calibration_error": "Mean distance between predicted and real survival.",
    "tokens_real_over_planned": "Tokens emitted over tokens the plans expected.",
}
TOTALS = {
    "planned_rows": "Rows planned, over all verifications.",
    "real_rows": "Rows run, over all verifications.",
    "planned_seconds": "Seconds that plans expected steps to take.",
    "real_seconds": "Seconds that steps took.",
}


class Exporter:
    """Brings a registry's metrics up to date with the totals, whenever called. One per process."""

    def __init__(self, metrics: SpeculationMetrics, registry: Any = None):
        from prometheus_client import REGISTRY, Counter, Gauge

        self.metrics = metrics
        options: dict[str, Any] = {"registry": registry or REGISTRY}
        per_position = {name for name, value in metrics.counters().items() if isinstance(value, list)}
        per_position |= {name for name, value in metrics.gauges(False).items() if isinstance(value, list)}

        def labels(name: str) -> list[str]:
            return ["position"] if name in per_position else []

        self.counters = {
            name: Counter(f"deepinfer_spec_{name}", text, labels(name), **options)
            for name, text in (COUNTERS | TOTALS).items()
        }
        self.gauges = {
            name: Gauge(f"deepinfer_spec_{name}", text, labels(name), multiprocess_mode="mostrecent", **options)
            for name, text in GAUGES.items()
        }
        self.told: dict[tuple[str, int], float] = {}

    def update(self, profiled: bool) -> None:
        totals = self.metrics.counters() | {name: self.metrics.histograms()[name].total for name in TOTALS}
        for name, counter in self.counters.items():
            for position, child, value in _children(counter, totals[name]):
                child.inc(value - self.told.get((name, position), 0.0))
                self.told[name, position] = value
        values = self.metrics.gauges(profiled)
        for name, gauge in self.gauges.items():
            for _, child, value in _children(gauge, values[name]):
                child.set(value)


def _children(metric: Any, value: Any) -> list[tuple[int, Any, float]]:
    """(position, what to set, value) of a metric with or without positions."""
    if not isinstance(value, list):
        return [(0, metric, value)]
    return [(index, metric.labels(position=str(index + 1)), each) for index, each in enumerate(value)]
