"""A plain refusal is one message and exit code 1; a bug keeps its traceback."""

from __future__ import annotations

import sys

import pytest

from deepinfer_plugin import refusals
from deepinfer_plugin.conflicts import ConflictError
from deepinfer_plugin.patches.plain_refusals import get_exception_traceback


def test_only_refusals_are_printed_plainly(monkeypatch, capsys):
    others = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: others.append(error))
    refusals.print_plainly()
    hook = sys.excepthook
    refusals.print_plainly()
    assert sys.excepthook is hook, "once"
    hook(ConflictError, ConflictError(["--page-size 63: legal: 64, 128"]), None)
    text = capsys.readouterr().err
    assert text.startswith("error: --model-impl deepinfer cannot serve") and "legal: 64, 128" in text
    assert not others
    bug = ValueError("a bug")
    hook(ValueError, bug, None)
    assert others == [(ValueError, bug, None)] and capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", refusals.kinds())
def test_a_scheduler_logs_the_text_alone(kind):
    error = kind("somewhere", ["something"]) if kind.__name__ == "CheckpointError" else kind("something")
    try:
        raise error
    except kind:
        assert get_exception_traceback(lambda: "Traceback ...") == str(error)


def test_a_scheduler_logs_the_traceback_of_a_bug():
    try:
        raise ValueError("a bug")
    except ValueError:
        assert get_exception_traceback(lambda: "Traceback ...") == "Traceback ..."
