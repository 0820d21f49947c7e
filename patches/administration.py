"""Requests to an administrator's endpoints that would end the server or leave weights half replaced are answered no.

SGLang gives memory back through its memory saver, which our pools do not use, and replaces weights through loaders that
do not know what this model makes of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ..model_impl import serves
from .hook import Hook

MEMORY = "releasing memory is not supported by this model: its pools do not use SGLang's memory saver"
WEIGHTS = "replacing weights is not supported by this model; start a server on the other checkpoint"
CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"


async def refuse_memory(original: Callable[..., Awaitable[Any]], self: Any, *args: Any, **kwargs: Any) -> Any:
    if serves(self.model_config):
        raise ValueError(MEMORY)
    return await original(self, *args, **kwargs)


async def refuse_weights(original: Callable[..., Awaitable[Any]], self: Any, *args: Any, **kwargs: Any) -> Any:
    if serves(self.model_config):
        return False, WEIGHTS
    return await original(self, *args, **kwargs)


async def refuse_weights_from_disk(
    original: Callable[..., Awaitable[Any]], self: Any, *args: Any, **kwargs: Any
) -> Any:
    if serves(self.model_config):
        return False, WEIGHTS, 0
    return await original(self, *args, **kwargs)


def _hook(name: str, target: str, around: Callable[..., Any]) -> Hook:
    return Hook(name, f"{target}.{name}", around, f"a request to /{name} can end the server", required=False)


HOOKS = (
    _hook("release_memory_occupation", CONTROL, refuse_memory),
    _hook("resume_memory_occupation", CONTROL, refuse_memory),
    _hook("init_weights_update_group", CONTROL, refuse_weights),
    _hook("update_weights_from_distributed", CONTROL, refuse_weights),
    _hook("update_weights_from_tensor", CONTROL, refuse_weights),
    _hook("update_weights_from_ipc", CONTROL, refuse_weights),
    _hook(
        "update_weights_from_disk",
        "sglang.srt.managers.tokenizer_manager.TokenizerManager",
        refuse_weights_from_disk,
    ),
)
