"""Writing newly reserved locations into the request table, for a decode step that reserves room for drafts.

SGLang launches a Triton kernel unless its own CPU engine is switched on; the plugin runs on a CPU without that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .hook import Hook


def assign_req_to_token_pool(
    original: Callable[..., None],
    slots: Any,
    req_to_token: Any,
    starts: Any,
    ends: Any,
    locations: Any,
    batch_size: int,
) -> None:
    import torch
    from sglang.srt.runtime_context import attention_backends

    from ..arguments import ATTENTION_BACKEND

    if req_to_token.device.type != "cpu" or ATTENTION_BACKEND not in attention_backends():
        original(slots, req_to_token, starts, ends, locations, batch_size)
        return
    counts = (ends - starts).to(torch.int64)
    owners = torch.repeat_interleave(torch.arange(batch_size), counts)
    offsets = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
    req_to_token[slots[owners].to(torch.int64), starts[owners] + offsets] = locations.to(req_to_token.dtype)


HOOK = Hook(
    "token_locations",
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
    assign_req_to_token_pool,
    "speculative decoding on a CPU would need a Triton kernel",
    required=False,
)
