"""Platforms SGLang has no class for. One entry point chooses among them: SGLang drops the whole package of a platform
it did not select, so two entry points in one package would switch each other's hooks off."""

from __future__ import annotations

import os


def choose() -> str | None:
    """The class to load, as a dotted path; None on a machine with an accelerator, or under SGLang's own CPU engine."""
    import torch

    if torch.accelerator.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return "deepinfer_plugin.platform.cpu.CpuPlatform"
