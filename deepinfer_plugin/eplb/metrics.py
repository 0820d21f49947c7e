"""What balancing did, in numbers, for one set of experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan

from deepinfer_plugin.speculative.metrics import Distribution

STALL_SECONDS = tuple(1e-5 * 2**n for n in range(18))  # 10 us .. 1.3 s


@dataclass
class BalanceMetrics:
    """Balances and gains as ``Decision`` has them; NaN: not known yet."""

    decisions: int = 0
    rebalances: int = 0
    moved_experts: int = 0
    moved_bytes: int = 0
    balance: float = nan  # of the latest window
    balance_before: float = nan  # of the window that led to the latest rebalance
    balance_forecast: float = nan  # what that rebalance was to make of it
    predicted_gain_seconds: float = nan
    predicted_cost_seconds: float = nan
    real_gain: float = nan
    stalls: Distribution = field(default_factory=lambda: Distribution(STALL_SECONDS))  # a call of the mover
    longest_stall: float = 0.0

    def stalled(self, seconds: float) -> None:
        self.stalls.observe(seconds)
        self.longest_stall = max(self.longest_stall, seconds)

    def counters(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("decisions", "rebalances", "moved_experts", "moved_bytes")}

    def gauges(self) -> dict[str, float]:
        names = ("balance", "balance_before", "balance_forecast", "real_gain", "longest_stall")
        return {name: getattr(self, name) for name in (*names, "predicted_gain_seconds", "predicted_cost_seconds")}
