"""p-value of Pearson's test, so that tests of distributions need no further package."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 5.0  # observations that a cell of the test must expect


def p_value(observed: Tensor, expected: Tensor) -> float:
    """Counts against expected counts (same total, any shape). Cells expected less than ``LEAST`` times are pooled, and
    the rarest of the others with them until the pool is expected as often. 0 if something was observed that cannot be;
    1 if only one cell is left."""
    observed, expected = observed.double().flatten(), expected.double().flatten()
    if observed[expected == 0].any():
        return 0.0
    expected, order = expected.sort()
    observed = observed[order]
    before = expected.cumsum(0) - expected
    pooled = (expected < LEAST) | ((before > 0) & (before < LEAST))
    observed, expected = (torch.cat([each[~pooled], each[pooled].sum()[None]]) for each in (observed, expected))
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) < 2:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
