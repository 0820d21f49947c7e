"""The two heads of the draft stages."""

from __future__ import annotations

import torch
from torch import Tensor

from .numeric import Weight, product


def markov(prev: Tensor, embed: Tensor, head: Weight) -> tuple[Tensor, Tensor]:
    e = embed[prev]
    return head.multiply(e).to(torch.float32), e


def confidence(hidden: Tensor, e: Tensor, proj: Tensor) -> Tensor:
    features = torch.cat((hidden, e.to(hidden.dtype)), -1)
    return product(features, proj).squeeze(-1).to(torch.float32)
