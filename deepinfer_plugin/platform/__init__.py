"""Platforms of ours: a machine without an accelerator, and the Ascend 950. One entry point chooses among them: SGLang
drops the whole package of a platform it did not select, so two entry points in one package would switch each other's
hooks off."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)


def choose() -> str | None:
    """The class to load, as a dotted path; None where SGLang's own platform serves: another accelerator, its own CPU
    engine, or an Ascend that is not supported (then a warning says what was found)."""
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    if not torch.accelerator.is_available():
        return "deepinfer_plugin.platform.cpu.CpuPlatform"
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "npu":
        return None
    from ..kernels.ascend import soc

    problem = soc.machine().problem()
    if problem:
        logger.warning("deepinfer_plugin leaves this device to SGLang: %s", problem)
        return None
    return "deepinfer_plugin.platform.ascend.AscendPlatform"
