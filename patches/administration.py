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


def no_memory() -> None:
    raise ValueError(MEMORY)


def no_weights() -> tuple[bool, str]:
    return False, WEIGHTS


def no_weights_from_disk() -> tuple[bool, str, int]:
    return *no_weights(), 0  # requests paused for it


def _hook(name: str, answer: Callable[[], Any], target: str = CONTROL) -> Hook:
    """``answer`` in place of SGLang's method ``name``, for our model."""

    async def around(original: Callable[..., Awaitable[Any]], self: Any, *args: Any, **kwargs: Any) -> Any:
        return answer() if serves(self.model_config) else await original(self, *args, **kwargs)

    return Hook(name, f"{target}.{name}", around, f"a request to /{name} can end the server", required=False)


HOOKS = (
    _hook("release_memory_occupation", no_memory),
    _hook("resume_memory_occupation", no_memory),
    _hook("init_weights_update_group", no_weights),
    _hook("update_weights_from_distributed", no_weights),
    _hook("update_weights_from_tensor", no_weights),
    _hook("update_weights_from_ipc", no_weights),
    _hook("update_weights_from_disk", no_weights_from_disk, "sglang.srt.managers.tokenizer_manager.TokenizerManager"),
)
