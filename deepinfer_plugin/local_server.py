"""A server as a child process: start it, wait until it answers, stop all of it. Used by the demo, the benchmarks and
the tests."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil
import requests

PR_SET_PDEATHSIG = 1


class ServerDied(RuntimeError):
    """The server exited before it was ready; the message ends with its refusal, or with the tail of its log."""


def _end_with_parent() -> None:
    """In the child: be told to end when whoever started the server ends without saying so, killed for example. (Linux
    means the thread that started it.)"""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


# A server listens half a minute after its port was chosen. Below these numbers and above, others may take it meanwhile:
# SGLang's rendezvous (22000 and up), and the system for whoever connects somewhere (32768 and up). From its port SGLang
# derives others, 240 above it at most.
PORTS = range(10240, 22000 - 256, 256)


def claim_port() -> tuple[int, socket.socket]:
    """A port for a server on this machine that will listen later, and what keeps it from every other caller until it is
    closed, in this process and others: the port's namesake of UDP.

    Raises:
        OSError: all are taken.
    """
    for port in random.sample(PORTS, len(PORTS)):
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
            socket.create_server(("127.0.0.1", port)).close()
            return port, claim
        except OSError:
            claim.close()
    raise OSError(errno.EADDRINUSE, f"no free port among {PORTS[0]}, {PORTS[1]}, ..., {PORTS[-1]}")


class LocalServer:
    """``python -m sglang.launch_server --model-impl deepinfer`` in its own process group, logging to ``log``.

    ``with LocalServer(path, log=...) as server:`` starts it and returns once it answers; leaving the block ends
    every process of the group. ``ready_s`` is the time from start to the first answer.
    """

    def __init__(
        self,
        model_path: str | Path,
        *flags: str,
        log: str | Path,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600,
        model_impl: str | None = "deepinfer",
    ):
        self.port, self._claim = claim_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log, self.timeout_s = Path(log), timeout_s
        self.command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_path)]
        if model_impl is not None:
            self.command += ["--model-impl", model_impl]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), *flags]
        self.env = {**os.environ, **(env or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self.ready_s = 0.0

    def __enter__(self) -> LocalServer:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    def wait_ready(self) -> None:
        """
        Raises:
            ServerDied: the process exited; TimeoutError: no answer within ``timeout_s`` of the start, nor now.
        """
        assert self.process is not None
        while True:
            if self.process.poll() is not None:
                raise ServerDied(f"server exited with {self.process.returncode}\n{self.last_words()}")
            try:
                if requests.get(f"{self.url}/health_generate", timeout=30).status_code == 200:
                    self.ready_s = time.monotonic() - self.started
                    return
            except requests.RequestException:
                pass
            if time.monotonic() - self.started >= self.timeout_s:
                raise TimeoutError(f"server not ready after {self.timeout_s:.0f} s\n{self.tail()}")
            time.sleep(0.25)

    def last_words(self) -> str:
        """Of a server that died: the refusal that its log ends with (``refusals``), else the log's tail."""
        _, refused, text = f"\n{self.log.read_text(errors='replace')}".rpartition("\nerror: ")
        return f"error: {text.rstrip()}" if refused and "Traceback" not in text else self.tail()

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def processes(self) -> list[psutil.Process]:
        """The server and everything it started that still runs."""
        if self.process is None:
            return []
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def rss_bytes(self) -> int:
        """Resident memory summed over all processes; pages they share are counted in each."""
        total = 0
        for process in self.processes():
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    def stop(self, grace_s: float = 20) -> None:
        """Ask the process group to end, then make it."""
        if self.process is None:
            return
        members = self.processes()
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            _, members = psutil.wait_procs(members, timeout=grace_s)
            if not members:
                break
        self.process.wait()
        self.process = None
        self._claim.close()
