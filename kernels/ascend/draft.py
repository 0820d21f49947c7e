"""The two heads of the draft stages."""

from __future__ import annotations

import torch
from torch import Tensor

from .linear import wide_product


def markov(prev: Tensor, embed: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    e = embed.index_select(0, prev)
    return wide_product(e, head), e


def confidence(hidden: Tensor, e: Tensor, proj: Tensor) -> Tensor:
    features = torch.cat((hidden.to(torch.float32), e.to(torch.float32)), -1)
    return (features * proj.to(torch.float32)).sum(-1)
