"""Ascend 950 (arch 3510) with CANN 9.2 or newer. Another Ascend keeps SGLang's own platform and is told so by name.

Detection and the support table are in ``kernels/ascend/soc.py``; here is how SGLang meets the device. Never executed on
hardware (docs/ascend.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

import torch
from sglang.srt.platforms.npu import NPUSRTPlatform

# What the runtime reads when it starts, for our model only; a value the user gave is kept.
ENVIRONMENT: Mapping[str, str] = {
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",  # pools of many sizes would fragment fixed segments
    "TASK_QUEUE_ENABLE": "0",  # a second launch queue reorders host errors away from the op that caused them
    "HCCL_BUFFSIZE": "16",  # MiB a communicator; the default of 200 is taken from the page pool
}


class AscendPlatform(NPUSRTPlatform):
    """SGLang's NPU platform, which also serves its own models here: allocator, streams, events, HCCL groups and the
    switch for captured graphs are as they are there. Our model captures no graph on an Ascend."""

    def init_backend(self) -> None:
        """On each worker's device, before weights: exact float32 products, no just-in-time choice of kernels, weights
        in the cube's own layout."""
        torch.npu.matmul.allow_hf32 = False  # type: ignore[attr-defined]
        torch.npu.set_compile_mode(jit_compile=False)  # type: ignore[attr-defined]
        torch.npu.config.allow_internal_format = True  # type: ignore[attr-defined]


def apply_environment(env: MutableMapping[str, str] = os.environ) -> None:
    """Set what the runtime reads when it starts, for the processes that serve our model."""
    for name, value in ENVIRONMENT.items():
        env.setdefault(name, value)


def device_conflict(env: Mapping[str, str] = os.environ) -> str | None:
    """Why the variables that choose devices cannot both be meant, or None: ranks would share a device."""
    ours, other = env.get("ASCEND_RT_VISIBLE_DEVICES"), env.get("CUDA_VISIBLE_DEVICES")
    if ours is None or other is None or ours == other:
        return None
    return (
        f"ASCEND_RT_VISIBLE_DEVICES={ours} and CUDA_VISIBLE_DEVICES={other} choose different devices and SGLang reads "
        "both: unset one or make them equal"
    )
