"""AdamW on the masters, with a rate that a recorded step can read."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

WARM_UP = 0.03  # of the steps, with a rising rate
LAST_RATE = 0.05
CLIP = 1.0
WEIGHT_DECAY = 0.1


def rate_at(step: int, steps: int) -> float:
    """Factor on the learning rate: a short rise, then half a cosine."""
    rise = max(1, int(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def decays(name: str, parameter: Tensor) -> bool:
    """Matrices of the sublayers; not tables, norms and mixes."""
    return parameter.dim() > 1 and "embed" not in name and "hc_" not in name


class Optimiser:
    def __init__(self, parameters: Iterable[tuple[str, Tensor]], rate: float):
        trained = [(name, p) for name, p in parameters if p.requires_grad]
        self.parameters = [p for _, p in trained]
        device = self.parameters[0].device
        on_gpu = device.type == "cuda"
        self.base = rate
        self.rate = torch.tensor(rate, device=device) if on_gpu else rate
        groups = [
            {"params": [p for name, p in trained if decays(name, p)], "weight_decay": WEIGHT_DECAY},
            {"params": [p for name, p in trained if not decays(name, p)], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            groups, lr=self.rate, betas=(0.9, 0.95), eps=1e-10, fused=on_gpu, capturable=on_gpu
        )

    def set_rate(self, step: int, steps: int) -> None:
        rate = self.base * rate_at(step, steps)
        if isinstance(self.rate, Tensor):
            self.rate.fill_(rate)
        else:
            for group in self.adam.param_groups:
                group["lr"] = rate

    def step(self) -> Tensor:
        """Clip, move, forget the gradients. Returns their norm before."""
        norm = nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return norm
