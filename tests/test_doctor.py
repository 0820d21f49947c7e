"""``deepinfer doctor``: what it finds and how it says so."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from deepinfer_plugin import patches
from deepinfer_plugin.cli import doctor
from deepinfer_plugin.kernels import OP_NAMES, Provider, providers, register, unregister

from .probes import ask


@pytest.fixture(scope="module")
def answers(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("doctor")
    mute, cut = shutil.copytree(tiny, root / "mute"), shutil.copytree(tiny, root / "cut")
    file = mute / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("<｜User｜>", "<｜Someone｜>"), encoding="utf-8")
    next(cut.glob("*-00001-of-*.safetensors")).unlink()
    (cut / "dspark_calibration.json").write_text("[]")
    strange = shutil.copytree(tiny, root / "strange")
    config = json.loads((strange / "config.json").read_text())
    config["text_config"]["engram_compressed_vocab_size"] += 1
    (strange / "config.json").write_text(json.dumps(config))
    questions = {
        "fine": ("doctor", {"model_path": str(tiny)}),
        "degraded": ("doctor", {"env": {"DEEPINFER_DISABLE_HOOKS": "replayed_tokens"}}),
        "hook off": ("doctor", {"env": {"DEEPINFER_DISABLE_HOOKS": "page_pool"}}),
        "not loaded": ("doctor", {"env": {"SGLANG_PLUGINS": "__none__"}}),
        "mute": ("doctor", {"model_path": str(mute)}),
        "cut": ("doctor", {"model_path": str(cut)}),
        "strange": ("doctor", {"model_path": str(strange)}),
    }
    return dict(zip(questions, ask(*questions.values()), strict=True))


def test_a_machine_that_serves(answers):
    found = answers["fine"]
    assert (found["verdict"], found["exit_code"], found["problems"]) == ("fine", 0, [])
    others = {provider.name: "-" for provider in providers() if provider.name != "reference"}
    assert found["ops"] == {op: {**others, "reference": "in use"} for op in OP_NAMES}
    assert found["hooks"] == {hook.name: "in place" for hook in patches.HOOKS}
    assert found["versions"]["sglang"] == patches.SGLANG_VERSION
    assert found["platform"] == "deepinfer_plugin.platform.cpu.CpuPlatform"


def test_degraded(answers):
    found = answers["degraded"]
    assert (found["verdict"], found["exit_code"]) == ("degraded", 1)
    assert found["hooks"]["replayed_tokens"] == "switched off"
    assert "replayed_tokens" in found["problems"][0]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("hook off", ["page_pool", "switched off"]),
        ("not loaded", ["SGLANG_PLUGINS", "missing"]),
        ("mute", ["tokenizer.json", "<｜User｜>"]),
        ("cut", ["00001-of", "dspark_calibration.json"]),
        ("strange", ["token classes", "do not belong together"]),
    ],
)
def test_cannot_serve(answers, case, words):
    found = answers[case]
    assert (found["verdict"], found["exit_code"]) == ("cannot serve", 2)
    assert all(word in "\n".join(found["problems"]) for word in words), found["problems"]


def test_the_command_prints_one_json_object():
    command = [
        sys.executable,
        "-c",
        "from deepinfer_plugin.cli import main; raise SystemExit(main())",
        "doctor",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert {"ops", "hooks", "versions", "verdict"} <= json.loads(done.stdout).keys()


# ---- without SGLang ------------------------------------------------------------------------------------------------


def test_another_version_of_sglang(monkeypatch):
    monkeypatch.setattr(patches, "sglang_version", lambda: "0.6.0")
    report = doctor.examine()
    assert report.exit_code == 2 and report.hooks == {}, "SGLang is not even imported"
    assert any("0.6.0" in text and f"sglang=={patches.SGLANG_VERSION}" in text for _, text in report.problems)


def test_missing_packages(monkeypatch):
    def version(name, real=metadata.version):
        if name in ("openai-harmony", "deepseek-recipe"):
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    versions, problems = doctor._versions()
    assert versions["openai-harmony"] is None
    assert [(severity, text.split()[0]) for severity, text in problems] == [
        (2, "deepseek-recipe"),
        (1, "openai-harmony"),
    ]
    assert "/v1/responses" in problems[1][1] and "pip install openai-harmony" in problems[1][1]


def test_ops_of_several_providers(monkeypatch):
    register(Provider("other", lambda device: None, lambda device: {"rope": print}))
    register(Provider("absent", lambda device: "no such device", lambda device: {}))
    try:
        ops, problems = doctor._ops()
        some = ("other", "absent", "reference")
        assert [ops["rope"][name] for name in some] == ["in use", "-", "available"]
        assert [ops["linear"][name] for name in some] == ["-", "-", "in use"]
        assert problems == [], "a CPU has its reference"

        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
        _, problems = doctor._ops()
        assert problems[0][0] == 2 and "no provider serves" in problems[0][1] and "linear" in problems[0][1]
        assert (1, "provider absent is not available on meta: no such device") in problems
        assert not any("ascend" in text or "cuda" in text for _, text in problems), "they are for other devices"
    finally:
        unregister("other")
        unregister("absent")
    report = doctor.Report(ops=ops, problems=problems)
    assert "rope" in str(report) and str(report).endswith("verdict: cannot serve")
