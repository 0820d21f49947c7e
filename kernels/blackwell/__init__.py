"""The blackwell provider: NVIDIA B200 and B300 (compute capability 10.x). Not run on that hardware so far.

The ops that decide how fast a step is are DeepSeek's own kernels for these GPUs, called through their public
interfaces: ``deep_gemm`` (FP8 products, MXFP4 experts, FP4 index scores) and ``flash_mla`` (sparse attention), which
compile on a machine with such a GPU and a CUDA toolkit. Everything else is the cuda provider's: its Triton kernels, and
the radix selection, which uses no instruction of one GPU.

They round where production does, so index scores exist for the profile ``deepinfer`` only. A row's bits may depend on
its batch: the libraries choose tiles by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import cuda
from . import libraries

MAJOR = 10  # of the compute capability
PROFILES = {"index_scores": ("deepinfer", "float32")}
OURS = (
    "prepare_dense",
    "dense",
    "rms_norm",
    "rope",
    "hc_mix",
    "hc_collapse",
    "hc_expand",
    "window_pack",
    "window_write",
    "compress_pair",
    "tail_write",
    "latent_write",
    "index_key_write",
    "ngram_write",
    "candidate_blocks",
    "top_groups",
    "moe_gate",
    "assign_slots",
    "swiglu",
    "engram_hash",
    "engram_gather",
    "engram_gate",
    "markov",
    "confidence",
)  # of the cuda provider


def unavailable(device: torch.device) -> str | None:
    """Why nothing here runs on ``device``, or None."""
    if why := cuda.unserved(device, f"{MAJOR}.x", lambda found: found[0] == MAJOR):
        return why
    return libraries.missing()


def ops(device: torch.device) -> Mapping[str, Callable[..., Any]]:
    """Op -> implementation; the same on every GPU that is served."""
    from ..cuda import linear as triton_linear
    from . import attention, experts, index, linear

    theirs = (
        linear.prepare_linear,
        linear.linear,
        triton_linear.prepare_grouped,  # what the cuda provider has is for Hopper
        triton_linear.grouped_linear,
        experts.prepare_experts,
        experts.replace_expert,
        experts.read_expert,
        experts.moe_experts,
        index.index_scores,
        attention.sparse_attention,
    )
    known = cuda.every_op()
    return {name: known[name] for name in OURS} | {function.__name__: function for function in theirs}
