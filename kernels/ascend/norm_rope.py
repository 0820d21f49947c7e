"""RMSNorm (torch_npu, in float32 so that there is one rounding) and rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor

from .vendor import op

# 2 pi in parts of at most 6 significant bits, so that a product with a turn count below 2^18 is exact in float32.
TURN = (6.25, 0.033203125, -1.78813934326171875e-05)
REST = 6.283185307179586 - sum(TURN)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.shape[0] == 0:
        return torch.empty_like(x)
    return op("npu_rms_norm")(x.to(torch.float32), weight.to(torch.float32), eps)[0].to(x.dtype)


def rope(x: Tensor, positions: Tensor, inv_freq: Tensor, inverse: bool) -> Tensor:
    angle = positions.to(torch.float32)[:, None] * inv_freq
    # Whole turns are taken off here: how well a device's cosine does that for arguments of 10^6 is not documented.
    turns = torch.round(angle * (1 / 6.283185307179586))
    for part in TURN:
        angle = angle - turns * part
    angle = angle - turns * REST
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (inv_freq.shape[0],)
    cos, sin = torch.cos(angle).view(shape), torch.sin(angle).view(shape)
    if inverse:
        sin = -sin
    size = 2 * inv_freq.shape[0]
    pairs = x[..., -size:].to(torch.float32)
    even, odd = pairs[..., 0::2], pairs[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)
    return torch.cat((x[..., :-size], turned), -1)
