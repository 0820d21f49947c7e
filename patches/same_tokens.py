"""The ranks that run the same rows take the tokens of the first of them.

SGLang trusts equal logits to give equal draws, and what follows from the rare exception is a hang. Its switch for the
careful takes the least of the ranks' tokens, which none may have drawn for the right reason, and brings in NCCL, on a
CPU too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..model_impl import selected
from .hook import Hook


def sync_token_ids(original: Callable[..., None], self: Any, tokens: Any, sampling_info: Any) -> None:
    """``tokens`` [B] are changed in place."""
    import torch.distributed as dist
    from sglang.srt.runtime_context import get_model

    if not selected(get_model().model_impl):
        original(self, tokens, sampling_info)
    elif dist.get_world_size(self.tp_sync_group) > 1:
        dist.broadcast(tokens, dist.get_global_rank(self.tp_sync_group, 0), group=self.tp_sync_group)


HOOK = Hook(
    "same_tokens",
    "sglang.srt.layers.sampler.Sampler._sync_token_ids_across_tp",
    sync_token_ids,
    "ranks that run the same requests may draw different tokens, and wait for each other for ever",
)
