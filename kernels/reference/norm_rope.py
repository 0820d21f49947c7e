"""RMSNorm and rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor

from .numeric import square_mean


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (x.to(torch.float64) / torch.sqrt(square_mean(x) + eps) * weight.to(torch.float64)).to(x.dtype)


def rope(x: Tensor, positions: Tensor, inv_freq: Tensor, inverse: bool) -> Tensor:
    # The angle is the float32 product, as in the published frequency tables: at position 10^6 its rounding is visible.
    angle = (positions.to(torch.float32)[:, None] * inv_freq).to(torch.float64)
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (inv_freq.shape[0],)
    cos = torch.cos(angle).to(torch.float32).to(torch.float64).view(shape)
    sin = torch.sin(angle).to(torch.float32).to(torch.float64).view(shape)
    if inverse:
        sin = -sin
    size = 2 * inv_freq.shape[0]
    pairs = x[..., -size:].to(torch.float64)
    even, odd = pairs[..., 0::2], pairs[..., 1::2]
    tail = x[..., -size:]
    tail[..., 0::2] = even * cos - odd * sin
    tail[..., 1::2] = odd * cos + even * sin
    return x
