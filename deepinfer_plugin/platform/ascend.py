"""Ascend 950 (arch 3510) with CANN 9.2 or newer. Another Ascend keeps SGLang's own platform and is told so by name.

Detection and the support table are in ``kernels/ascend/soc.py``; here is how SGLang meets the device. Never executed on
hardware (docs/ascend.md).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping

import torch
from sglang.srt.platforms.interface import PlatformCapabilities
from sglang.srt.platforms.npu import NPUSRTPlatform

logger = logging.getLogger(__name__)

# Set before the runtime allocates anything; a value the user gave is kept.
ENVIRONMENT: Mapping[str, str] = {
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",  # pools of many sizes would fragment fixed segments
    "TASK_QUEUE_ENABLE": "0",  # a second launch queue reorders host errors away from the op that caused them
    "HCCL_BUFFSIZE": "16",  # MiB a communicator; the default of 200 is taken from the page pool
}


class AscendPlatform(NPUSRTPlatform):
    """SGLang's NPU device operations, under a capability set of what this plugin has: no Triton, no captured graphs
    unless DEEPINFER_ASCEND_GRAPHS=1 asks for them."""

    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        if os.environ.get("DEEPINFER_ASCEND_GRAPHS") == "1":
            self.capabilities = PlatformCapabilities(graph_capture=True)

    def get_device(self, local_rank: int = 0) -> str:
        """A name: SGLang splits it like a string while it resolves arguments."""
        return f"npu:{local_rank}"

    def get_torch_distributed_backend_str(self) -> str:
        """Process groups are HCCL's."""
        return "hccl"

    def get_group_coordinator_device(self, local_rank: int) -> torch.device:
        return torch.device("npu", local_rank)

    def get_default_attention_backend(self) -> str:
        """For models other than ours; ours declares its own."""
        return "ascend"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Functions that SGLang would compile run as they are: no code generator for this device is assumed."""
        return "eager"

    def init_backend(self) -> None:
        """On each worker's device, before weights: exact float32 products, no just-in-time kernel selection."""
        torch.npu.set_compile_mode(jit_compile=False)  # type: ignore[attr-defined]
        torch.npu.config.allow_internal_format = True  # type: ignore[attr-defined]
        torch.npu.matmul.allow_hf32 = False  # type: ignore[attr-defined]


def apply_environment(env: MutableMapping[str, str] = os.environ) -> None:
    """Set what the runtime reads when it starts.

    Raises:
        ValueError: two variables that both choose devices disagree, so that ranks would share one.
    """
    for name, value in ENVIRONMENT.items():
        env.setdefault(name, value)
    ours, other = env.get("ASCEND_RT_VISIBLE_DEVICES"), env.get("CUDA_VISIBLE_DEVICES")
    if ours is not None and other is not None and ours != other:
        raise ValueError(
            f"ASCEND_RT_VISIBLE_DEVICES={ours} and CUDA_VISIBLE_DEVICES={other} choose different devices; SGLang reads "
            "both: unset one or make them equal"
        )
