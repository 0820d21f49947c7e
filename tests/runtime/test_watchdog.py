"""Who is to blame when a rank does not come, and who is not."""

import os
import subprocess
import sys
import threading
import time

import pytest

from deepinfer_plugin.runtime import watchdog
from deepinfer_plugin.runtime.watchdog import ALIVE, BEGUN, ENDED, PROCESS, Blame, Board, Watchdog

PATIENCE_S = 0.2


@pytest.fixture
def ranks():
    """Three watchdogs of this process on one board, none of them running."""
    path = Board.create(3)
    made = [Watchdog(Board(path, 3), rank, PATIENCE_S, lambda blame: None) for rank in range(3)]
    path.unlink()
    return made


def begin(dog, waits=1):
    dog.own[BEGUN] += waits
    dog.own[ENDED] += waits - 1
    dog.own[watchdog.WAITS_SINCE] = time.monotonic_ns() - int(2 * PATIENCE_S * 1e9)


def test_nobody_is_to_blame_for_a_short_wait(ranks):
    with ranks[0].waiting():
        assert ranks[0].verdict() is None
    time.sleep(2 * PATIENCE_S)
    assert ranks[0].verdict() is None, "it no longer waits"


def test_the_rank_that_others_wait_for_is_named(ranks):
    begin(ranks[0], 2)
    begin(ranks[1], 2)
    ranks[2].own[BEGUN] = ranks[2].own[ENDED] = 1
    for dog in ranks[:2]:
        assert dog.verdict().reason.startswith(f"rank 2 (process {os.getpid()}) hangs: rank {dog.rank} has waited")
    assert ranks[2].verdict() is None, "it does not wait, it is waited for"


def test_a_rank_that_has_left_the_wait_is_not_late(ranks):
    for dog in ranks:
        begin(dog)
    ranks[1].own[ENDED] += 1
    assert ranks[0].verdict() is None


def test_ranks_that_wait_for_each_other(ranks):
    for dog in ranks:
        begin(dog)
    assert "all ranks have waited for each other" in ranks[1].verdict().reason


def test_a_process_that_ended_is_named(ranks):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ranks[1].own[PROCESS] = ended.pid
    deadline = time.monotonic() + 60
    while ranks[0].verdict() is None and time.monotonic() < deadline:
        time.sleep(0.05)  # until it is a zombie; nobody has asked for its exit code
    assert ranks[0].verdict() == Blame(f"rank 1 (process {ended.pid}) died", ended.pid)
    ended.wait()
    ranks[1].own[PROCESS] = 0
    assert ranks[0].verdict() is None, "it left in good order"


def test_a_process_without_a_sign_of_life_is_named(ranks):
    ranks[2].own[ALIVE] -= int(2 * watchdog.SILENCE_S * 1e9)
    assert ranks[0].verdict().reason.startswith(f"rank 2 (process {os.getpid()}) has given no sign of life for 30 s")


STOPPED = """
import sys, time
from pathlib import Path
from deepinfer_plugin.runtime.watchdog import ALIVE, SILENCE_S, Board, Watchdog
path = Board.create(2)
dogs = [Watchdog(Board(path, 2), rank, 60, print) for rank in range(2)]
path.unlink()
for dog in dogs:
    dog.start()
    dog.stop()
    dog.own[ALIVE] -= int(2 * SILENCE_S * 1e9)
"""


def test_whoever_stopped_watching_says_nothing_when_it_ends():
    done = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_the_thread_tells(ranks, monkeypatch):
    monkeypatch.setattr(watchdog, "PERIOD_S", 0.05)
    told = threading.Event()
    ranks[0].blame = lambda blame: "rank 1" in blame.reason and told.set()
    begin(ranks[0])
    begin(ranks[2])
    ranks[0].start()
    assert told.wait(60)
    ranks[0].stop()
