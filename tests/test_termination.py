"""SIGTERM while a server starts: what it started is ended on the way out."""

from __future__ import annotations

import signal
import subprocess
import sys

from deepinfer_plugin import termination

STARTING = """
import os, signal, time
from deepinfer_plugin.termination import exit_on_sigterm
exit_on_sigterm()
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
finally:
    print("ends its children")
"""


def test_the_launcher_gets_to_end_its_children():
    done = subprocess.run([sys.executable, "-c", STARTING], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "ends its children\n", "")


def test_a_handler_of_others_stays(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: print)
    monkeypatch.setattr(signal, "signal", lambda *args: 1 / 0)
    termination.exit_on_sigterm()
