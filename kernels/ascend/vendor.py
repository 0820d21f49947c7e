"""The ops of torch_npu that this provider calls, by name.

A name that the installed torch_npu lacks raises; there is no second choice at run time. Types that torch has no number
for are torch_npu's own codes, which its ops insist on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

E4M3 = 292  # torch_npu.float8_e4m3fn
E8M0 = 293  # torch_npu.float8_e8m0fnu
E2M1_PAIR = 296  # torch_npu.float4_e2m1fn_x2
FRACTAL_NZ = 29  # the layout in which the cube reads weights

OPS = (
    "npu_dynamic_mx_quant",
    "npu_format_cast",
    "npu_grouped_matmul",
    "npu_mhc_sinkhorn",
    "npu_moe_distribute_combine_v2",
    "npu_moe_distribute_dispatch_v2",
    "npu_moe_gating_top_k",
    "npu_quant_matmul",
    "npu_rms_norm",
    "npu_transpose_quant_batchmatmul",
)


class MissingOp(NotImplementedError):
    """torch_npu, as installed, lacks an op that this provider calls; the message names both."""


def has(name: str) -> bool:
    """Whether the installed torch_npu has an op."""
    return hasattr(torch.ops.npu, name)


def op(name: str) -> Callable[..., Any]:
    """
    Raises:
        MissingOp: torch_npu is not loaded or has no such op.
    """
    assert name in OPS, name
    try:
        return getattr(torch.ops.npu, name)
    except AttributeError:
        raise MissingOp(f"torch_npu has no {name}: the ascend provider needs it and nothing takes its place") from None
