"""The blackwell provider without a Blackwell GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepinfer_plugin.kernels import blackwell
from deepinfer_plugin.kernels.blackwell import libraries
from deepinfer_plugin.kernels.cuda import index, jit, split

from . import documented

SUITE = Path(__file__).with_name("suite.py")


def test_suite_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-x", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=800)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", ran.stdout)[1]) > 50


def pretend(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_what_it_serves(monkeypatch, capability):
    pretend(monkeypatch, capability)
    with documented.installed():
        assert blackwell.unavailable(torch.device("cuda")) is None
        assert "call torch.cuda.set_device first" in blackwell.unavailable(torch.device("cuda:1"))


@pytest.mark.parametrize(("device", "capability", "why"), [
    ("cpu", (10, 0), "it needs an NVIDIA GPU"),
    ("cuda", (9, 0), "this GPU has 9.0"),
    ("cuda", (12, 0), "this GPU has 12.0"),
    ("cuda", (10, 0), "it needs deep_gemm, which does not import (No module named 'deep_gemm'); pip install "
     "deepinfer-gemm"),
])  # fmt: skip
def test_what_it_does_not_serve(monkeypatch, device, capability, why):
    pretend(monkeypatch, capability)
    assert why in blackwell.unavailable(torch.device(device))


def test_a_library_that_fails_in_its_own_way_is_named(monkeypatch):
    with documented.installed():
        monkeypatch.setitem(sys.modules, "flash_mla", None)
        assert "it needs flash_mla" in libraries.missing()


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_selection_and_slots_compile_there(arch):
    source = index.select_kernel(wide=False, block=8, held=1, vector=True, arch=arch).source
    for each in (source, split.kernel(384, 32, 8, arch).source):
        code, _ = jit.compile_source(each)
        assert code[:4] == b"\x7fELF"
    assert jit._cache_path(source) != jit._cache_path(
        index.select_kernel(wide=False, block=8, held=1, vector=True).source
    )


def test_what_it_takes_from_the_cuda_provider_is_not_for_hopper_alone():
    """Kernels in CUDA C++ are for one GPU, but for the selection and the division of rows, compiled for both."""
    taken = [sys.modules[function.__module__] for function in blackwell.ops(torch.device("cpu")).values()]
    ours = {module for module in taken if ".kernels.cuda." in module.__name__}
    assert {module for module in ours if '.cu"' in Path(module.__file__).read_text()} == {index, split}
