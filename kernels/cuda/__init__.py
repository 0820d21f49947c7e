"""The cuda provider: NVIDIA Hopper (compute capability 9.0).

One kernel one file. CUDA C++ (``*.cu``, compiled on first use by ``jit``) where the tensor cores have to be fed by
hand, Triton elsewhere. Triton kernels also run in Triton's interpreter (TRITON_INTERPRET=1), on a CPU, so that the
contract suite covers them without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

CAPABILITY = (9, 0)
MULTIPROCESSORS = 132  # of an H100 and an H200: how work is split may not depend on the GPU at hand, or bits would


def unavailable(device: torch.device) -> str | None:
    """Why nothing here runs on ``device``, or None."""
    if device.type == "cpu" and _interpreted():
        return None
    return unserved(device, "{}.{}".format(*CAPABILITY), lambda found: found == CAPABILITY)


def unserved(device: torch.device, capability: str, served: Callable[[tuple[int, int]], bool]) -> str | None:
    """Why kernels for that compute capability do not run on ``device``, or None."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.cuda is None:
        return "it needs an NVIDIA GPU"
    found = torch.cuda.get_device_capability(device)
    if not served(found):
        return "its kernels are written for compute capability {}, this GPU has {}.{}".format(capability, *found)
    if device.index not in (None, torch.cuda.current_device()):
        return f"it runs on the current GPU, cuda:{torch.cuda.current_device()}; call torch.cuda.set_device first"
    return None


# Op -> profiles; FP8 tensor cores are not what others ask for.
FAST_PROFILES = dict.fromkeys(("linear", "grouped_linear", "moe_experts"), ("deepinfer",))


def fast_ops(device: torch.device) -> Mapping[str, Callable[..., Any]]:
    """Op -> implementation of the fast class: FP8 tensor cores, which add with fewer bits."""
    return every_fast_op() if device.type == "cuda" else {}


def every_fast_op() -> dict[str, Callable[..., Any]]:
    from . import experts_fp8, fp8_linear_fast

    return _by_name(
        fp8_linear_fast.prepare_linear,
        fp8_linear_fast.linear,
        fp8_linear_fast.prepare_grouped,
        fp8_linear_fast.grouped_linear,
        experts_fp8.prepare_experts,
        experts_fp8.replace_expert,
        experts_fp8.read_expert,
        experts_fp8.moe_experts,
    )


def ops(device: torch.device) -> Mapping[str, Callable[..., Any]]:
    """Op -> implementation; on a CPU those that Triton can interpret."""
    return every_op() if device.type == "cuda" else _triton()


def every_op() -> dict[str, Callable[..., Any]]:
    """Op -> implementation, whatever the device: another provider may serve some of them on other GPUs."""
    return _triton() | _cpp()


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _triton() -> dict[str, Callable[..., Any]]:
    from . import attention, draft, engram, gate, linear, memory, norm_rope, streams

    return _by_name(
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
        attention.sparse_attention,
        gate.moe_gate,
        gate.swiglu,
        engram.engram_hash,
        engram.engram_gather,
        engram.engram_gate,
        draft.markov,
        draft.confidence,
    )


def _cpp() -> dict[str, Callable[..., Any]]:
    from . import attention_cpp, experts, fp8_linear, index, site, split

    return _by_name(
        fp8_linear.prepare_linear,
        fp8_linear.linear,
        fp8_linear.prepare_grouped,
        fp8_linear.grouped_linear,
        attention_cpp.sparse_attention,
        index.index_scores,
        index.candidate_blocks,
        index.top_groups,
        split.assign_slots,
        experts.prepare_experts,
        experts.replace_expert,
        experts.read_expert,
        experts.moe_experts,
        site.hc_site,
    )


def _by_name(*functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {function.__name__: function for function in functions}
