"""Platform activation on the real torch_npu: detection, allocator, streams, events; nothing to compute with."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch_npu

from deepinfer_plugin.kernels.ascend import soc, vendor

from ..test_soc import tree

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def sglang():
    """SGLang's platform classes from the main environment, without the rest of SGLang."""
    home = next((ROOT / ".venv" / "lib").glob("python3*/site-packages/sglang"), None)
    if home is None:
        pytest.skip("the main environment has no SGLang: run make setup")
    for name, path in (("sglang", home), ("sglang.srt", home / "srt")):
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        sys.modules.setdefault(name, module)


def fake_machine(root: Path, cann: str) -> Path:
    tree(root, usr__local__Ascend__cann__version_info="")
    (root / "usr/local/Ascend/cann/version.info").write_text(f"Version={cann}\n")
    (root / "usr/local/Ascend/driver").mkdir()
    (root / "usr/local/Ascend/driver/version.info").write_text("Version=25.5.0\n")
    return root


def test_versions_are_the_pinned_ones():
    assert torch_npu.__version__.startswith("2.13.0") and torch.__version__ == "2.13.0+cpu"


def test_type_codes():
    theirs = torch_npu.float8_e4m3fn, torch_npu.float8_e8m0fnu, torch_npu.float4_e2m1fn_x2
    assert theirs == (vendor.E4M3, vendor.E8M0, vendor.E2M1_PAIR)


@pytest.mark.parametrize("name", vendor.OPS)
def test_every_vendor_op_exists(name):
    assert vendor.op(name) is getattr(torch.ops.npu, name)


def test_an_op_that_torch_npu_lacks(monkeypatch):
    monkeypatch.setattr(vendor, "OPS", ("npu_engram",))
    with pytest.raises(vendor.MissingOp, match="npu_engram"):
        vendor.op("npu_engram")


def test_a_950_is_recognised(tmp_path):
    found = soc.machine(fake_machine(tmp_path, "9.2.0"), {})
    assert (found.soc, found.cann, found.driver) == ("Ascend950PR_9589", "9.2.0", "25.5.0")
    assert found.torch_npu.startswith("2.13.0") and found.problem() is None


def test_an_old_cann_is_refused(tmp_path):
    assert "not supported: found 9.1.0" in soc.machine(fake_machine(tmp_path, "9.1.0"), {}).problem()


@pytest.mark.parametrize("name", ["Ascend910B3", "Ascend310P3"])
def test_another_chip_is_refused_by_name(name, tmp_path):
    root = fake_machine(tmp_path, "9.2.0")
    code = f"""
import torch, torch_npu, logging
from pathlib import Path
from deepinfer_plugin.kernels.ascend import soc
from deepinfer_plugin import platform
real = soc.machine
soc.machine = lambda: real(Path({str(root)!r}), {{}})
logging.basicConfig()
print("CHOSEN", platform.choose(), "|", soc.machine().problem())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ASCEND_STUB_SOC": name},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert f"CHOSEN None | it needs an Ascend 950 (arch 3510); not supported: found {name}" in done.stdout, done.stderr


def test_activation(sglang, tmp_path, monkeypatch):
    from deepinfer_plugin import platform

    real = soc.machine
    monkeypatch.setattr(soc, "machine", lambda: real(fake_machine(tmp_path, "9.2.0"), {}))
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "npu"
    path = platform.choose()
    assert path == "deepinfer_plugin.platform.ascend.AscendPlatform"

    from deepinfer_plugin.platform.ascend import ENVIRONMENT, AscendPlatform, apply_environment

    for name in ENVIRONMENT:
        monkeypatch.setenv(name, ENVIRONMENT[name])
    apply_environment()
    found = AscendPlatform()
    found.set_device(torch.device("npu", 0))
    found.init_backend()
    assert found.get_device_name(0) == "Ascend950PR_9589"
    assert found.get_device_total_memory(0) == 128 << 30
    free, total = found.get_available_memory(0)
    assert 0 < free < total
    assert found.get_device(0) == torch.device("npu", 0)
    assert torch.npu.matmul.allow_hf32 is False, "float32 products are float32"
    found.empty_cache()
    found.synchronize()


def test_memory_streams_and_events():
    before = torch.npu.memory_allocated()
    x = torch.empty(1 << 20, dtype=torch.uint8, device="npu")
    assert torch.npu.memory_allocated() >= before + (1 << 20) and x.view(4, -1).shape == (4, 1 << 18)
    with torch.npu.stream(torch.npu.Stream()):
        event = torch.npu.Event()
        event.record()
    event.synchronize()
    assert event.query()


def test_compute_raises():
    """The stub has no operator library: an adapter that ran here would be running somewhere else."""
    x = torch.empty(2, 64, device="npu")
    for compute in (lambda: x + 1, lambda: x @ x.t(), lambda: vendor.op("npu_rms_norm")(x, x[0], 1e-6)):
        with pytest.raises(RuntimeError, match="aclnn"):
            compute()


def test_the_hardware_script_is_skipped_without_cann():
    """The stub looks like a 950; that is not enough."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch_npu, runpy; runpy.run_module('tests.ascend.hardware', run_name='__main__')",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "ascend hardware: SKIPPED (it needs CANN 9.2 or newer; none was found)" in done.stdout
