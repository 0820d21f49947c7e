"""TileLang kernels for the Ascend 950, one op one file: what the provider's plain operations do in many launches and
with gathered addresses, in one. bf16 activations only; a row at a time on each vector core, or on a whole core where
the cube has a part.

They are a provider of their own, ``ascend-tilelang``: lowered by TileLang's Ascend pipeline and emulated on a CPU, but
never executed, so they serve an op only where they are asked for by name
(``--deepinfer-ops window_pack=ascend-tilelang``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch

from .. import soc

# Op -> the argument whose type decides, a tensor or a dtype; None: the op moves bytes and has no activations.
ACTIVATION: Mapping[str, int | None] = {
    "rms_norm": 0,
    "rope": 0,
    "hc_mix": 0,
    "hc_collapse": 0,
    "hc_expand": 0,
    "window_pack": 0,
    "window_write": None,
    "compress_pair": 6,
    "tail_write": None,
    "latent_write": 0,
    "index_key_write": 0,
    "ngram_write": None,
    "index_scores": 0,
    "candidate_blocks": 0,
    "top_groups": 0,
    "sparse_attention": 0,
    "swiglu": 0,
    "moe_experts": 0,
    "engram_hash": None,
    "engram_gather": 3,
    "engram_gate": 0,
    "markov": None,
    "confidence": 0,
}


def unavailable(device: torch.device) -> str | None:
    """Why nothing here runs on ``device``, or None."""
    if device.type != "npu":
        return "it needs an Ascend 950"
    if find_spec("tilelang") is None:
        return "it needs TileLang: pip install tilelang==0.1.15"
    return soc.machine().problem()


def ops(device: torch.device) -> Mapping[str, Callable[..., Any]]:
    """Op -> implementation. Imports TileLang."""
    from . import (
        candidate_blocks,
        collapse,
        compress_pair,
        confidence,
        engram_gate,
        engram_gather,
        engram_hash,
        expand,
        experts,
        index_scores,
        markov,
        mix,
        norm,
        page_write,
        rope,
        row_write,
        sparse_attention,
        swiglu,
        top_groups,
        window_pack,
    )

    functions = (
        norm.rms_norm,
        rope.rope,
        mix.hc_mix,
        collapse.hc_collapse,
        expand.hc_expand,
        window_pack.window_pack,
        row_write.window_write,
        compress_pair.compress_pair,
        row_write.tail_write,
        page_write.latent_write,
        page_write.index_key_write,
        row_write.ngram_write,
        index_scores.index_scores,
        candidate_blocks.candidate_blocks,
        top_groups.top_groups,
        sparse_attention.sparse_attention,
        swiglu.swiglu,
        experts.moe_experts,
        engram_hash.engram_hash,
        engram_gather.engram_gather,
        engram_gate.engram_gate,
        markov.markov,
        confidence.confidence,
    )
    layouts = (markov.prepare_dense, experts.prepare_experts, experts.replace_expert, experts.read_expert)
    return {function.__name__: _bf16_only(function) for function in functions} | {
        function.__name__: function for function in layouts
    }


def _bf16_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse float32 activations, a debugging profile, by name: no kernel here takes them."""
    name = function.__name__
    decides = ACTIVATION[name]

    @wraps(function)
    def run(*args: Any) -> Any:
        if decides is not None and getattr(args[decides], "dtype", args[decides]) != torch.bfloat16:
            raise NotImplementedError(f"{name} of ascend-tilelang takes bfloat16 only; force {name}=ascend for float32")
        return function(*args)

    return run
