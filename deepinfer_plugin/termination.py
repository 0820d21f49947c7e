"""A server that is told to end while it starts takes its processes with it.

SGLang handles SIGTERM once it serves. Before that the signal ends the first process alone, and a process that it has
just started may never notice: one whose parent is gone before it asks to be told waits for ever.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType


def exit_on_sigterm() -> None:
    """SIGTERM becomes SystemExit, on whose way out SGLang's launcher ends every process it started. A handler that
    somebody has set stays; SGLang sets its own later."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
