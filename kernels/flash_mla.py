"""DeepSeek's FlashMLA, as far as all devices for which it was built are alike: one call."""

from __future__ import annotations

import importlib

from torch import Tensor


def attend(
    q: Tensor,
    keys: Tensor,
    indices: Tensor,
    more: Tensor | None,
    chosen: Tensor | None,
    sink: Tensor,
    scale: float,
    *,
    batch_invariant: bool,
) -> Tensor:
    """[n, heads, D] of q bf16 [n, heads, D], each row over keys of its own.

    keys: packed rows uint8 [n, S, 528], with indices int32 [n, 1, S]: their numbers among all n * S, -1 where there is
    none. more, chosen: likewise for latents, [n, K, 288], or None. sink: float32 [heads].
    """
    library = importlib.import_module("flash_mla")
    plan, _ = library.get_mla_metadata()  # of this call: it depends on how many keys each row has
    out, _ = library.flash_mla_with_kvcache(
        q[:, None].contiguous(),
        keys[:, :, None],
        None,
        None,
        q.shape[2],
        plan,
        softmax_scale=scale,
        indices=indices,
        attn_sink=sink.contiguous(),
        extra_k_cache=None if more is None else more[:, :, None],
        extra_indices_in_kvcache=chosen,
        enable_batch_invariant=batch_invariant,
    )
    return out[:, 0]
