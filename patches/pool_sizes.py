"""How much memory becomes pages. SGLang picks the sizer from the kinds of attention it knows; ours also pays for
request state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..model_impl import serves
from .hook import Hook


def create_memory_pool_configurator(original: Callable[..., Any], configurator: Any) -> Any:
    if not serves(configurator.model_config):
        return original(configurator)
    from ..runtime.pools import PoolSizer

    return PoolSizer(configurator)


HOOK = Hook(
    "pool_sizes",
    "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator",
    create_memory_pool_configurator,
    "pools would be sized for another kind of attention",
)
