"""Load the torch references of DeepSeek's tile-kernels without its compiler.

The package imports tilelang at its top, which needs a GPU tool chain. Its ``torch/*.py`` files need five small
helpers only; they are loaded by path, the helpers with a stand-in for tilelang that knows the largest values of two
number formats.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest

from tests.fetch_tile_kernels import UNPACKED

HELPERS = ("utils", "config", "quant.types", "quant.common")
REFERENCES = ("cast", "engram", "mhc", "norm", "reduce_fused", "rope", "swiglu", "topk")


def load() -> SimpleNamespace:
    """Namespace of the reference modules by name, and ``config``."""
    if not UNPACKED.is_dir():
        message = f"{UNPACKED} is missing; run: python tests/fetch_tile_kernels.py"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    root = UNPACKED / "tile_kernels"
    language = MagicMock(name="tilelang.language")
    largest = {language.float8_e4m3fn: 448.0, language.float4_e2m1fn: 6.0}
    language.max_value = largest.__getitem__
    tilelang = ModuleType("tilelang")
    tilelang.language = language  # type: ignore[attr-defined]
    stubs = {"tilelang": tilelang, "tilelang.language": language}
    for package in ("tile_kernels", "tile_kernels.quant", "tile_kernels.torch"):
        stubs[package] = ModuleType(package)
        stubs[package].__path__ = []
    modules = (*HELPERS, *(f"torch.{name}" for name in REFERENCES))
    sys.modules.update(stubs)
    try:
        with patch("torch.compile", lambda function: function):  # eager gives the same numbers
            loaded = {name: _load(f"tile_kernels.{name}", root / f"{name.replace('.', '/')}.py") for name in modules}
    finally:
        for name in (*stubs, *(f"tile_kernels.{name}" for name in modules)):
            sys.modules.pop(name, None)
    return SimpleNamespace(config=loaded["config"], **{name: loaded[f"torch.{name}"] for name in REFERENCES})


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # removed by the caller
    spec.loader.exec_module(module)
    return module
