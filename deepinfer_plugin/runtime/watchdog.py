"""A rank that dies or hangs ends the others, with its name, instead of leaving them in a collective for ever.

The ranks of one machine share a board, a small file in memory with a line for each: its process, its last sign of life
(from a thread of its own), and how many waits for other ranks its main thread has begun and ended. Whoever waits longer
than ``patience_s`` looks for the rank that has begun fewer waits than itself; that one is to blame.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import psutil

PERIOD_S = 0.5
SILENCE_S = 15.0  # without a sign of life, a process is stopped or dead
PROCESS, ALIVE, BEGUN, ENDED, WAITS_SINCE = range(5)
COLUMNS = 5


class Board:
    """int64 [ranks, 5]: process id, sign of life, waits begun, waits ended, begin of the current wait; times in
    nanoseconds of the machine's monotonic clock, 0 before the first."""

    def __init__(self, path: Path, ranks: int):
        self.lines = np.memmap(path, dtype=np.int64, mode="r+", shape=(ranks, COLUMNS))

    @classmethod
    def create(cls, ranks: int) -> Path:
        """A new board's file; to be removed when every rank has opened it."""
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        handle, name = tempfile.mkstemp(prefix="deepinfer_ranks_", dir=folder)
        os.truncate(handle, ranks * COLUMNS * 8)
        os.close(handle)
        return Path(name)


@dataclass(frozen=True)
class Blame:
    """Why the ranks cannot go on. ``process``: of the rank to blame; None if all are."""

    reason: str
    process: int | None = None


class Watchdog:
    """Watches the ranks of a board in a thread; ``waiting`` is entered around every wait for others.

    blame: called once, from the thread, to end this rank.
    """

    def __init__(self, board: Board, rank: int, patience_s: float, blame: Callable[[Blame], object]):
        self.board, self.rank, self.patience_s, self.blame = board, rank, patience_s, blame
        self.own = board.lines[rank]
        self.own[PROCESS] = os.getpid()
        self._beat()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank-watchdog", daemon=True)

    def start(self) -> None:
        atexit.register(self._leave)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        atexit.unregister(self._leave)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        own = self.own
        own[WAITS_SINCE] = time.monotonic_ns()
        own[BEGUN] += 1
        try:
            yield
        finally:
            own[ENDED] += 1

    def _leave(self) -> None:
        """A rank that ends in good order is nobody's fault. One that ends because a collective failed says why it did:
        the collective only knows that a connection is gone."""
        self.stop()
        self.own[PROCESS] = 0
        if found := self.verdict():
            print(f"error: {found.reason}; rank {self.rank} ends", file=sys.stderr, flush=True)

    def _beat(self) -> None:
        self.own[ALIVE] = time.monotonic_ns()

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_S):
            paused = time.monotonic_ns() - self.own[ALIVE] > 4 * PERIOD_S * 1e9
            self._beat()
            if paused:  # perhaps the whole machine was, and the others have not caught up yet
                continue
            if found := self.verdict():
                self.blame(found)
                return

    def verdict(self) -> Blame | None:
        """Which other rank is to blame for what; None: nobody."""
        now, lines = time.monotonic_ns(), np.array(self.board.lines)
        for rank, (process, alive, *_) in enumerate(lines.tolist()):
            if rank == self.rank or not process:
                continue
            name = f"rank {rank} (process {process})"
            if not _runs(process):
                return Blame(f"{name} died", process)
            if now - alive > SILENCE_S * 1e9:
                return Blame(f"{name} has given no sign of life for {(now - alive) / 1e9:.0f} s", process)
        begun, ended, since = self.own[BEGUN], self.own[ENDED], self.own[WAITS_SINCE]
        if begun == ended or now - since < self.patience_s * 1e9:
            return None
        # Counts of waits compare between ranks because all make the same calls in the same order.
        late = [rank for rank, line in enumerate(lines) if line[PROCESS] and line[BEGUN] < begun]
        if not late:
            if (lines[:, BEGUN] == begun).all() and (lines[:, ENDED] < begun).all():
                return Blame(
                    f"all ranks have waited for each other for {(now - since) / 1e9:.0f} s: they disagree about what "
                    "to exchange (--deepinfer-check-ranks finds out who)"
                )
            return None
        rank = min(late, key=lambda late_rank: lines[late_rank][BEGUN])
        process = int(lines[rank][PROCESS])
        waited = f"rank {self.rank} has waited {(now - since) / 1e9:.0f} s for it (limit {self.patience_s:g} s)"
        return Blame(f"rank {rank} (process {process}) hangs: {waited}", process)


def _runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def end_server(rank: int, blame: Blame) -> NoReturn:
    """End this rank's process and the one to blame, and let SGLang end the rest of the server. The main thread waits
    inside a collective and cannot be asked; a rank that hangs would keep SGLang waiting for a minute."""
    print(f"error: {blame.reason}; rank {rank} ends, and the server with it", file=sys.stderr, flush=True)
    if blame.process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(blame.process, signal.SIGKILL)
    parent = psutil.Process().parent()
    if parent is not None:
        parent.send_signal(signal.SIGQUIT)  # what SGLang's own ranks do when they fail
    os._exit(1)
