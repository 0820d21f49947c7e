"""The ascend provider: Ascend 950 (arch 3510). Never executed on that hardware so far (docs/ascend.md).

Every op has an answer: public torch_npu ops where their documented semantics are the contract's, plain torch operations
in float32 and integers elsewhere (``ANSWERS`` says which). Plain operations never wait for the host and address pools
by int64 numbers. An op that torch_npu lacks raises by name; nothing is handed to the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..reference import split
from . import attention, draft, engram, experts, gate, index, linear, memory, norm_rope, soc, streams


@dataclass(frozen=True)
class Answer:
    """How an op is served: ``vendor`` torch_npu ops (none: plain operations only), and what a reader must know."""

    vendor: tuple[str, ...] = ()
    note: str = ""


_QUANT = "npu_dynamic_mx_quant"
ANSWERS: Mapping[str, Answer] = {
    "linear": Answer((_QUANT, "npu_quant_matmul"), "MXFP8 x MXFP8; float32 activations plain"),
    "dense": Answer((), "bf16 product, or float32 where the result is"),
    "grouped_linear": Answer((_QUANT, "npu_transpose_quant_batchmatmul"), "the vendor's with fp8=True only"),
    "rms_norm": Answer(("npu_rms_norm",), "in float32, so that it rounds once"),
    "rope": Answer((), "whole turns are taken off before cos and sin"),
    "hc_mix": Answer(("npu_mhc_sinkhorn",), "product and gates plain; the fused pre op collapses at the wrong site"),
    "hc_collapse": Answer(),
    "hc_expand": Answer(),
    "window_pack": Answer((_QUANT,)),
    "window_write": Answer(),
    "compress_pair": Answer(),
    "tail_write": Answer(),
    "latent_write": Answer(),
    "index_key_write": Answer(),
    "ngram_write": Answer(),
    "index_scores": Answer((), "keys dequantised a slab at a time, bf16 products"),
    "candidate_blocks": Answer((), "a stable sort of int32 keys"),
    "top_groups": Answer((), "a stable sort of int32 keys"),
    "sparse_attention": Answer((), "keys dequantised row by row, float32 products: slow; FlashMLA where asked for"),
    "moe_gate": Answer(("npu_moe_gating_top_k",), "ties and NaN as the vendor ranks them, which is not documented"),
    "assign_slots": Answer((), "some twenty plain operations a round, so the model asks for none"),
    "swiglu": Answer(),
    "moe_experts": Answer((_QUANT, "npu_format_cast", "npu_grouped_matmul"), "W4A8; float32 activations plain"),
    "engram_hash": Answer(),
    "engram_gather": Answer((), "a table in host memory is read there by design"),
    "engram_gate": Answer(),
    "markov": Answer(),
    "confidence": Answer(),
}

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
        streams.hc_mix,
        streams.hc_collapse,
        streams.hc_expand,
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
        gate.moe_gate,
        split.assign_slots,
        gate.swiglu,
        experts.prepare_experts,
        experts.replace_expert,
        experts.read_expert,
        experts.moe_experts,
        engram.engram_hash,
        engram.engram_gather,
        engram.engram_gate,
        draft.markov,
        draft.confidence,
    )
}


def unavailable(device: torch.device) -> str | None:
    """Why nothing here runs on ``device``, or None."""
    if device.type != "npu":
        return "it needs an Ascend 950"
    return soc.machine().problem()


def ops(device: torch.device) -> Mapping[str, Callable[..., Any]]:
    """Op -> implementation; the same on every 950."""
    return OPS
