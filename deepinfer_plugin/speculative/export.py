"""``SpeculationMetrics`` in SGLang's Prometheus endpoint: ``deepinfer_spec_*``, per draft position where it says so."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from .metrics import Distribution, SpeculationMetrics

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
    "predicted_survival": "Mean survival predicted for verified drafts, by position.",
    "real_survival": "Share of verified drafts that were accepted, by position.",
    "calibration_error": "Mean distance between predicted and real survival.",
    "tokens_real_over_planned": "Tokens emitted over tokens the plans expected.",
}
HISTOGRAMS = {
    "accept_length": "Tokens a request got from a verification, the target's own included.",
    "planned_rows": "Rows of a verification, as planned.",
    "real_rows": "Rows of a verification, as run.",
    "planned_seconds": "Seconds that a plan expected its step to take.",
    "real_seconds": "Seconds that a step took.",
}


class Exporter:
    """Brings a registry's metrics up to date with the totals, whenever called. One per process.

    With SGLang's ``--enable-metrics`` another process answers scrapes, from files that the metric objects of this one
    write (``PROMETHEUS_MULTIPROC_DIR``). So everything is told to such objects; a collector would never be asked.
    """

    def __init__(self, metrics: SpeculationMetrics, registry: Any = None):
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        self.metrics = metrics
        options: dict[str, Any] = {"registry": registry or REGISTRY}
        per_position = {name for name, value in metrics.counters().items() if isinstance(value, list)}
        per_position |= {name for name, value in metrics.gauges(False).items() if isinstance(value, list)}

        def labels(name: str) -> list[str]:
            return ["position"] if name in per_position else []

        self.counters = {
            name: Counter(f"deepinfer_spec_{name}", text, labels(name), **options) for name, text in COUNTERS.items()
        }
        self.gauges = {
            name: Gauge(f"deepinfer_spec_{name}", text, labels(name), multiprocess_mode="mostrecent", **options)
            for name, text in GAUGES.items()
        }
        self.histograms = {
            name: Histogram(f"deepinfer_spec_{name}", HISTOGRAMS[name], buckets=distribution.edges, **options)
            for name, distribution in metrics.histograms().items()
        }
        self.growth = Growth()

    def update(self, profiled: bool) -> None:
        totals = self.metrics.counters()
        for name, counter in self.counters.items():
            for position, child, value in _children(counter, totals[name]):
                child.inc(self.growth((name, position), value))
        values = self.metrics.gauges(profiled)
        for name, gauge in self.gauges.items():
            for _, child, value in _children(gauge, values[name]):
                child.set(value)
        for name, distribution in self.metrics.histograms().items():
            self.growth.tell(self.histograms[name], name, distribution)


class Growth:
    """What totals have grown by since they were asked for last."""

    def __init__(self) -> None:
        self.told: dict[Hashable, float] = {}

    def __call__(self, key: Hashable, value: float) -> float:
        old, self.told[key] = self.told.get(key, 0.0), value
        return value - old

    def tell(self, histogram: Any, key: Hashable, distribution: Distribution) -> None:
        """As SGLang's own collector does it: ``observe`` takes one value at a time, and a step has one accept length
        per request."""
        for bucket, count in enumerate(distribution.counts.tolist()):
            if new := self((key, bucket), count):
                histogram._buckets[bucket].inc(new)
        histogram._sum.inc(self((key, "sum"), distribution.total))


def _children(metric: Any, value: Any) -> list[tuple[int, Any, float]]:
    """(position, what to set, value) of a metric with or without positions."""
    if not isinstance(value, list):
        return [(0, metric, value)]
    return [(index, metric.labels(position=str(index + 1)), each) for index, each in enumerate(value)]
