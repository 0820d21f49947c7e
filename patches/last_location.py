"""The location before the next free one, for a decode step that reserves room for drafts.

SGLang picks a Triton kernel by the attention backend's name, also on a CPU, where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .hook import Hook


def get_last_loc(original: Callable[..., Any], req_to_token: Any, slots: Any, lengths: Any) -> Any:
    from sglang.srt.mem_cache.allocation import get_last_loc_torch
    from sglang.srt.runtime_context import attention_backends

    from ..arguments import ATTENTION_BACKEND

    if req_to_token.device.type != "cpu" or ATTENTION_BACKEND not in attention_backends():
        return original(req_to_token, slots, lengths)
    return get_last_loc_torch(req_to_token, slots, lengths)


HOOK = Hook(
    "last_location",
    "sglang.srt.mem_cache.allocation.get_last_loc",
    get_last_loc,
    "speculative decoding on a CPU would need a Triton kernel",
    required=False,
)
