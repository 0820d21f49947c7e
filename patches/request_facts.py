"""What a forward must know about its requests: the tokens before its first row, where each prompt ends, what is
replayed.

``ForwardBatch`` drops the requests when it is made from the scheduler's batch and has no field a plugin could fill
before that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..model_impl import serves
from .hook import Hook


def init_new(original: Callable[..., Any], cls: type, batch: Any, model_runner: Any, **options: Any) -> Any:
    forward_batch = original(cls, batch, model_runner, **options)
    if serves(model_runner.model_config):
        from ..runtime.requests import attach

        attach(forward_batch, batch)
        # With several attention groups SGLang would pad every rank to the longest; ours exchange what they have.
        forward_batch.global_num_tokens_cpu = None
    return forward_batch


HOOK = Hook(
    "request_facts",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
    init_new,
    "a request that starts on a cached prefix would not know the tokens before it",
)
