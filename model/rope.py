"""Rotary frequencies. Window-only layers and DSpark rotate at ``rope_theta``; layers that read compressed latents at
``compress_rope_theta`` with YaRN, for queries, window keys, latents, index queries and keys alike."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import V41Config


def inverse_frequencies(config: V41Config, compressed: bool) -> Tensor:
    """float32 [rope_dim / 2]."""
    dim = config.rope_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / (theta**exponent)
    scaling = config.rope_scaling
    if not compressed or scaling is None:
        return frequencies

    def dim_of(rotations: float) -> float:
        """The (fractional) dimension that turns ``rotations`` times over the original context."""
        return dim * math.log(scaling.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dim_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_of(scaling.beta_slow)), dim - 1)
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    # 1 - kept, not the ramp itself: the published table has this rounding, and at position 10^6 an ulp is an
    # angle of 1e-4.
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept
