"""Decisions are worked out in a process of their own: a thread would take the interpreter from the one that serves."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO, Protocol

from .decide import Decision, Request, decide, shuffle


class Solver(Protocol):
    """One question at a time."""

    def ask(self, request: Callable[[], Request]) -> None:
        """Start on a question; ``request`` may wait for the device and is called elsewhere."""

    def answer(self) -> Decision | None:
        """The answer to the latest question, once; None: not yet."""


class SolverFailed(RuntimeError):
    """The process that works out decisions has ended or failed; experts stay where they are."""


class SolverProcess:
    """A child process at the lowest priority, started with the first question. It ends when this process does, and with
    it its input.

    shuffled: every answer is a random migration, for tests.
    """

    def __init__(self, shuffled: bool = False):
        self.command = [sys.executable, "-m", "deepinfer_plugin.eplb.solver", *(["--shuffle"] if shuffled else [])]
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def work_out(self, request: Request) -> Decision:
        """
        Raises:
            SolverFailed: it has ended, or its work has failed.
        """
        with self._lock:
            if self.process is None:
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
                self.process = subprocess.Popen(
                    self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
                )
            assert self.process.stdin is not None and self.process.stdout is not None
            try:
                pickle.dump(request, self.process.stdin)
                self.process.stdin.flush()
                found = pickle.load(self.process.stdout)
            except (OSError, EOFError, pickle.PickleError) as error:
                raise SolverFailed(f"the balancer's process has ended: {error!r}") from None
        if isinstance(found, Exception):
            raise SolverFailed(f"the balancer's process: {found!r}")
        return found

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended before
                self.process.stdin.close()
            self.process.wait()


class ChildSolver:
    """The ``Solver`` of one set; ``process`` may have several."""

    def __init__(self, process: SolverProcess):
        self.process = process
        self._found: Decision | SolverFailed | None = None

    def ask(self, request: Callable[[], Request]) -> None:
        threading.Thread(target=self._converse, args=(request,), name="eplb-solver", daemon=True).start()

    def _converse(self, request: Callable[[], Request]) -> None:
        try:
            self._found = self.process.work_out(request())
        except SolverFailed as error:
            self._found = error

    def answer(self) -> Decision | None:
        """
        Raises:
            SolverFailed: there will be no answer, to no question.
        """
        found, self._found = self._found, None
        if isinstance(found, SolverFailed):
            raise found
        return found


def _serve(questions: BinaryIO, answers: BinaryIO, work: Callable[[Request, int], Decision]) -> None:
    number = 0
    with contextlib.suppress(EOFError):
        while True:
            request: Request = pickle.load(questions)
            number += 1
            try:
                found: Decision | Exception = work(request, number)
            except Exception as error:
                found = error
            pickle.dump(found, answers)
            answers.flush()


if __name__ == "__main__":
    os.nice(19)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its parent
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed is no answer
    _serve(sys.stdin.buffer, answers, shuffle if "--shuffle" in sys.argv else lambda request, _: decide(request))
