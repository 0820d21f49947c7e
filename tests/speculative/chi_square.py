"""p-value of Pearson's test, so that tests of distributions need no further package."""

from __future__ import annotations

import torch
from torch import Tensor


def p_value(observed: Tensor, expected: Tensor, least: float = 5.0) -> float:
    """Counts against expected counts (same total, any shape). Cells expected less than ``least`` times are pooled;
    an observation where nothing is expected gives 0."""
    observed, expected = observed.double().flatten(), expected.double().flatten()
    if observed[expected == 0].any():
        return 0.0
    small = expected < least
    if small.any():
        observed = torch.cat([observed[~small], observed[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
