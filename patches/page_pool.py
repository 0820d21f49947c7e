"""The pool itself. A platform may choose among SGLang's pool classes by attention kind; none of the kinds is an
opaque page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..model_impl import serves
from .hook import Hook


def build_token_to_kv_pool(
    original: Callable[..., Any], self: Any, *, sizes: Any, req_to_token_pool: Any, **kinds: Any
) -> Any:
    if not serves(self.model_config):
        return original(self, sizes=sizes, req_to_token_pool=req_to_token_pool, **kinds)
    from ..runtime.pools import build_pool

    return build_pool(self, sizes, req_to_token_pool)


HOOK = Hook(
    "page_pool",
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool",
    build_token_to_kv_pool,
    "the model would get key and value rows instead of pages",
)
