"""The reference provider: every op in plain torch, the definition of right.

Sums and functions are float64 inside and are rounded only where the contract says. It runs wherever torch does;
memory is bounded by working through rows in chunks, speed is not its subject.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import attention, draft, engram, hc, index, linear, memory, moe, norm_rope, split

OPS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        linear.prepare_linear,
        linear.linear,
        linear.prepare_dense,
        linear.dense,
        linear.prepare_grouped,
        linear.grouped_linear,
        norm_rope.rms_norm,
        norm_rope.rope,
        hc.hc_mix,
        hc.hc_collapse,
        hc.hc_expand,
        memory.window_pack,
        memory.window_write,
        memory.compress_pair,
        memory.tail_write,
        memory.latent_write,
        memory.index_key_write,
        memory.ngram_write,
        index.index_scores,
        index.candidate_blocks,
        index.top_groups,
        attention.sparse_attention,
        moe.moe_gate,
        split.assign_slots,
        moe.swiglu,
        moe.prepare_experts,
        moe.replace_expert,
        moe.read_expert,
        moe.moe_experts,
        engram.engram_hash,
        engram.engram_gather,
        engram.engram_gate,
        draft.markov,
        draft.confidence,
    )
}
