"""``replayed_tokens`` beside ``cached_tokens`` in a response's ``meta_info``.

The scheduler sends the number in SGLang's per-token side channel, which reaches ``meta_info`` as a list that
streaming slices and pads. It is one number per request, so it is taken out of the channel here, before that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..runtime.requests import REPLAYED_TOKENS
from .hook import Hook


def update_request_meta_info(
    original: Callable[..., None],
    self: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, list[Any]],
    index: int,
    finish_reason: Any,
) -> None:
    if REPLAYED_TOKENS in customized_info:
        customized_info = dict(customized_info)
        values = customized_info.pop(REPLAYED_TOKENS)[index]
        if values and values[0] is not None:  # only beside the request's first output token
            state.replayed_tokens = values[0]
        meta_info[REPLAYED_TOKENS] = getattr(state, "replayed_tokens", 0)
    original(self, meta_info, state, customized_info, index, finish_reason)


HOOK = Hook(
    "replayed_tokens",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
    update_request_meta_info,
    "replayed_tokens is reported as a list per token",
    required=False,
)
