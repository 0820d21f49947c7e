"""The generated table and the page it is in; the hardware script without hardware. Runs no tier."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from deepinfer_plugin.kernels import OP_NAMES, registry
from deepinfer_plugin.kernels.ascend import ANSWERS, dispatch, tiles, vendor

from . import roofline, table

DOCS = table.ROOT / "docs" / "ascend.md"


def result(**counts):
    empty = {"passed": 0, "failed": 0, "skipped": 0, "reasons": [], "ops": {}, "seconds": 1}
    return {**empty, "about": "", "date": "2026-11-30", **counts}


def test_every_op_is_answered_and_named():
    found = table.as_json({"A": result(passed=3, ops={"rope": {"passed": 3, "failed": 0, "skipped": 0}})})
    assert found["without_answer"] == [] and list(found["ops"]) == list(OP_NAMES)
    assert found["ops"]["rope"]["tiers"] == {"A": {"passed": 3, "failed": 0, "skipped": 0}}
    assert not any(row["executed_on_hardware"] for row in found["ops"].values())
    assert json.dumps(found)
    used = {name for answer in ANSWERS.values() for name in answer.vendor}
    assert used | set(dispatch.OPS) == set(vendor.OPS), "what the table says is called and what may be called"
    assert set(tiles.ACTIVATION) <= set(OP_NAMES)


def test_an_op_without_an_answer_shows(monkeypatch):
    monkeypatch.setattr(table, "ANSWERS", {op: answer for op, answer in ANSWERS.items() if op != "rope"})
    assert table.as_json({"A": result()})["without_answer"] == ["rope"]


@pytest.mark.parametrize(
    ("test", "ops"),
    [
        ("test_agrees_with_reference[bf16-window_attention-7]", {"sparse_attention"}),
        ("test_shapes_and_dtypes[linear 1280x5120-48]", {"linear"}),
        ("test_page_write[released-latent_write-latent_write-16]", {"latent_write"}),
        ("test_collapse[small]", {"hc_collapse"}),
        ("test_lowers[mix-released]", {"hc_mix"}),
        ("test_lowers[row_write tail-small]", {"tail_write"}),
        ("test_memory_streams_and_events", set()),
    ],
)
def test_tests_are_counted_for_their_op(test, ops):
    assert table.ops_of(test) == ops


def test_a_tier_is_stale_when_what_it_runs_changed(tmp_path, monkeypatch):
    """Each tier by its own tests and the kernels; a change to another tier's tests leaves it alone."""
    for name in ("kernels/a.py", "model/m.py", "tests/kernels/cases.py", "tests/ascend/emitted.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    for name in ("tests/kernels/test_contract.py", "tests/kernels/test_identity.py", "tests/ascend/lowered/test_x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    (tmp_path / "tests/ascend/stubbed").mkdir()
    (tmp_path / "deepinfer_plugin/platform").mkdir(parents=True)
    monkeypatch.setattr(table, "ROOT", tmp_path)
    keys = lambda: {name: table.sources(table.TIERS[name]) for name in "ABE"}  # noqa: E731
    before = keys()
    (tmp_path / "tests/ascend/lowered/test_x.py").write_text("2")
    assert {name for name, key in keys().items() if key != before[name]} == {"B"}
    (tmp_path / "model/m.py").write_text("2")
    assert {name for name, key in keys().items() if key != before[name]} == {"A", "B"}
    (tmp_path / "kernels/a.py").write_text("2")
    assert {name for name, key in keys().items() if key != before[name]} == {"A", "B", "E"}


def test_failures_and_skips_are_counted_with_reasons(tmp_path):
    (tmp_path / "r.xml").write_text(
        """<testsuites><testsuite><testcase name="test_rope[a]"/>
        <testcase name="test_rope[b]"><failure message="off by one&#10;more"/></testcase>
        <testcase name="test_x"><skipped message="no device"/></testcase></testsuite></testsuites>"""
    )
    found = result()
    table._count(tmp_path / "r.xml", found)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert found["reasons"] == ["test_rope[b]: off by one", "test_x: no device"]
    assert found["ops"]["rope"] == {"passed": 1, "failed": 1, "skipped": 0}


def test_the_page_is_generated_from_the_answers():
    text = DOCS.read_text(encoding="utf-8")
    for op in OP_NAMES:
        row = f"| {op} | {table.implementation(op)} | {'yes' if op in tiles.ACTIVATION else ''} |"
        assert row in text, f"{row}: run python -m tests.ascend.table --docs docs/ascend.md"
    assert "failed**" not in text, "a tier had failures when the table was written"
    assert roofline.table() in text, "run python -m tests.ascend.roofline"


def test_writing_the_page_keeps_the_rest(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.write_docs(page, {"A": result()})
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text and "| E |" in text


def test_the_hardware_script_is_skipped_without_a_device():
    done = subprocess.run(
        ["bash", str(table.ROOT / "scripts" / "run_on_ascend.sh")],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ascend hardware: SKIPPED (it needs an Ascend 950; no Ascend device was found)\n"


def test_the_report_asks_for_providers_that_serve_only_then(monkeypatch, reference):
    """Each of their ops on its own, the others as by default; a refusal is an outcome, not the end."""
    from . import hardware

    def refuses(*args):
        raise NotImplementedError("sizes")

    served = {"swiglu": reference._run["swiglu"], "rope": refuses}
    fake = registry.Provider("ascend-tilelang", lambda device: None, lambda device: served)
    gone = registry.Provider("ascend-flashmla", lambda device: "not there", lambda device: {})
    monkeypatch.setattr(registry, "_PROVIDERS", [registry._PROVIDERS[-1], fake, gone])
    monkeypatch.setattr(hardware, "OnDevice", lambda table: table)
    found = hardware.asked_for(reference, torch.device("cpu"))
    assert found["ascend-flashmla"] == "not there"
    assert {op: set(cases.values()) for op, cases in found["ascend-tilelang"].items()} == {
        "rope": {"NotImplementedError: sizes"},
        "swiglu": {"passed"},
    }


def test_the_roofline_is_plausible():
    one, many = roofline.LOADS[0], roofline.LOADS[2]
    assert one.bytes < many.bytes < 384 / 8 * 40 * roofline.EXPERT * roofline.MXFP4 + 2e10
    for chip in roofline.CHIPS.values():
        memory, products = one.milliseconds(chip)
        assert memory > products > 0
