"""Seeds for requests that sample, so that drafts can be drawn with the noise of the network's own draws."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_exec
from torch import Tensor

from deepinfer_plugin.model.parallel import Parallel

from ..runtime.shared_noise import Draws
from ..runtime.transfer import to_device


def sampler_takes_seeds() -> bool:
    """Whether SGLang's sampler draws from seeds if it is given some, whatever else a request asks for. Kernels that
    draw with noise of their own cannot tell a draft what they will draw."""
    return get_exec().kernel.sampling_backend == "pytorch"


class Seeds:
    """A seed for each of ``slots`` request slots; with ``--enable-deterministic-inference`` SGLang's, which are the
    requests' own, count instead."""

    def __init__(self, slots: int, device: torch.device | str, parallel: Parallel):
        self.by_slot = torch.zeros(slots, dtype=torch.int64, device=device)
        self.parallel = parallel
        # Seeded as everything random is, by --random-seed, but in each attention group differently.
        number = torch.initial_seed() + parallel.place.experts.index
        self.generator = torch.Generator().manual_seed(number % 2**63)

    def renew(self, info: Any, slots: Tensor) -> None:
        """New requests, or those that were taken back, have ``slots`` int64 [B]. info: SGLang's of the batch."""
        if info.is_all_greedy or info.sampling_seed is not None:
            return
        seeds = torch.randint(-(2**63), 2**63 - 1, slots.shape, generator=self.generator).tolist()
        self.by_slot[slots] = to_device(self.parallel.agree(seeds), self.by_slot.device)

    def draws(self, info: Any, slots: Tensor) -> Draws | None:
        """How requests in ``slots`` int64 [B] sample; None if all are greedy."""
        if info.is_all_greedy:
            return None
        seeds = self.by_slot[slots] if info.sampling_seed is None else info.sampling_seed
        return Draws(seeds.to(torch.int64), info.top_ks, info.temperatures[:, 0], info.top_ps, info.min_ps)
