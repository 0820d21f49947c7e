"""Memory of peers where no memory is shared: everybody's results are gathered. What nobody sent is NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_plugin.model.parallel import Group, ascending_sum


class GatheredPeers:
    """``travelled``: results that this rank has made for others."""

    def __init__(self, group: Group):
        self.group, self.travelled = group, 0

    def begin(self) -> None:
        pass

    def send(self, made: Tensor, local: Tensor, rows: int, size: int, dtype: torch.dtype) -> Tensor:
        here = local >= 0
        rank, place = self.group.rank, self.group.rank % size
        first = rank // size * rows
        own = slice(first + rows * place // size, first + rows * (place + 1) // size)
        found = made[own].new_full(made[own].shape, 255 if dtype == torch.uint8 else torch.nan, dtype=dtype)
        everything, everywhere = self.group.all_gather(made.contiguous()), self.group.all_gather(here.contiguous())
        assert everywhere.sum(0).max() <= 1, "made twice"
        for theirs, there in zip(everything, everywhere, strict=True):
            found[there[own]] = theirs[own][there[own]].to(dtype)
        self.travelled += int(here.sum() - here[own].sum())
        return found

    def ascending_sum(self, arrived: Tensor, ids: Tensor) -> Tensor:
        return ascending_sum(arrived.masked_fill((ids < 0)[..., None], 0), ids)
