"""Counter-based uniform numbers: a pure function of (seed, position, purpose, round), so what a request draws does
not depend on the batch it runs in, on the device, or on what ran before.

Each of the numbers below is used for at most one decision, which is what keeps rejection sampling exact:

* ``ACCEPT``, ``RESIDUAL`` and ``TARGET`` are keyed by the position of the token they decide. A position is emitted
  once, so ``round`` stays 0.
* ``DRAFT`` must also be keyed by the request's round. A position can be drafted several times before it is emitted,
  and the confidences of an earlier draft size later verifications: the same number again would let a draft
  influence, through that size, whether its own repetition is verified.
"""

from __future__ import annotations

import torch
from torch import Tensor

ACCEPT, RESIDUAL, TARGET, DRAFT = range(4)
_PURPOSES = 4

_BITS = 48  # (n + 1/2) / 2**48 is exact in float64 and stays clear of 0 and 1
_GOLDEN, _MIX1, _MIX2 = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # as int64


def uniform(seeds: Tensor, positions: Tensor, purpose: int, rounds: Tensor | int = 0) -> Tensor:
    """float64 in (0, 1), of the broadcast shape of the arguments.

    seeds, positions, rounds: int64, any value; ``rounds`` counts a request's verifications. purpose: one of the
    constants above.
    """
    state = _mix(seeds + _GOLDEN)
    state = _mix(state + _GOLDEN * (positions + 1))
    state = _mix(state + _GOLDEN * (torch.zeros_like(state) + rounds * _PURPOSES + purpose + 1))
    return ((state >> (64 - _BITS) & (1 << _BITS) - 1).double() + 0.5) * 2.0**-_BITS


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser. int64 multiplication wraps as unsigned would; right shifts must not drag the sign in."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _MIX1
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _MIX2
    return x ^ (x >> 31 & (1 << 33) - 1)
