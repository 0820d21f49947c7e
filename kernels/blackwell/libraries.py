"""DeepSeek's libraries, imported when they are first needed: importing them needs a GPU."""

from __future__ import annotations

import importlib
from typing import Any

PACKAGES = {"deep_gemm": "deepinfer-gemm", "flash_mla": "deepinfer-flashmla"}  # module -> package that has it


def missing() -> str | None:
    """Which library cannot be imported, and why; None if all can."""
    for module, package in PACKAGES.items():
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a compiled module finds wrong with this machine
            return f"it needs {module}, which does not import ({error}); pip install {package}"
    return None


def deep_gemm() -> Any:
    return importlib.import_module("deep_gemm")
