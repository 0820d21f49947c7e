"""Which platform is chosen on an Ascend, and what doctor says of one. Needs no torch_npu; the real one over a stub
runtime is in ``stubbed/test_runtime.py``."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.platforms.npu import NPUSRTPlatform

from deepinfer_plugin import platform
from deepinfer_plugin.cli import doctor
from deepinfer_plugin.kernels.ascend import soc
from deepinfer_plugin.kernels.ascend.soc import Machine
from deepinfer_plugin.platform import ascend

from .test_soc import GOOD


@pytest.fixture
def on_npu(monkeypatch):
    """A machine whose accelerator is an Ascend that reports what the test says."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="npu"))
    return lambda machine: monkeypatch.setattr(soc, "machine", lambda: machine)


def test_a_950_gets_our_platform(on_npu):
    on_npu(GOOD)
    before = dict(os.environ)
    assert platform.choose() == "deepinfer_plugin.platform.ascend.AscendPlatform"
    assert dict(os.environ) == before, "SGLang's own models must find everything as it was"


@pytest.mark.parametrize(
    "machine",
    [
        Machine("Ascend910B3", 8, "25.5.0", "9.2.0", "2.13.0"),
        Machine("Ascend950PR_9589", 8, "25.5.0", "8.5.0", "2.13.0"),
        Machine("Ascend950PR_9589", 8, "25.5.0", "9.2.0", "2.10.0"),
    ],
)
def test_another_is_left_to_sglang_by_name(on_npu, machine, caplog):
    on_npu(machine)
    with caplog.at_level(logging.WARNING):
        assert platform.choose() is None
    assert "not supported: found" in caplog.text


def test_another_accelerator_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(soc, "machine", lambda: pytest.fail("looked for an Ascend"))
    assert platform.choose() is None


def test_environment():
    env = {"HCCL_BUFFSIZE": "64"}
    ascend.apply_environment(env)
    assert env == {**ascend.ENVIRONMENT, "HCCL_BUFFSIZE": "64"}, "a value the user gave is kept"


def test_variables_that_disagree():
    both = {"ASCEND_RT_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"}
    assert "choose different devices" in ascend.device_conflict(both)
    assert ascend.device_conflict({**both, "CUDA_VISIBLE_DEVICES": "0,1"}) is None
    assert ascend.device_conflict({"CUDA_VISIBLE_DEVICES": "0"}) is None


def test_sglang_keeps_its_identity():
    """What is keyed on an NPU for SGLang's own models stays so."""
    found = ascend.AscendPlatform()
    assert found.is_npu() and found.capabilities == NPUSRTPlatform.capabilities
    assert found.get_torch_distributed_backend_str() == "hccl"


def test_doctor_is_silent_without_an_ascend():
    assert doctor._ascend() == ({}, [])


@pytest.mark.parametrize(("machine", "severity"), [(GOOD, None), (Machine("Ascend910B3", 8, None, "8.3.0", None), 2)])
def test_doctor_on_an_ascend(monkeypatch, machine, severity):
    monkeypatch.setattr(soc, "machine", lambda: machine)
    rows, problems = doctor._ascend()
    assert list(rows) == ["SoC", "driver", "CANN", "torch_npu"]
    assert [level for level, _ in problems] == ([] if severity is None else [severity])
    text = str(doctor.Report(ascend=rows, problems=problems))
    assert machine.soc in text and "Ascend 950 (arch 3510)" in text
    assert severity is None or "not supported: found Ascend910B3" in text
