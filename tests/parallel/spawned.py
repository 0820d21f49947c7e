"""Ranks as processes of this machine, for tests of the library: gloo, no SGLang."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

PATIENCE_S = 300  # of a test with its ranks, on a machine that does other things too


def run(work: Callable[..., Any], ranks: int, folder: Path, *arguments: Any) -> list[Any]:
    """``work(rank, *arguments)`` in each of ``ranks`` processes that form one gloo group: what they returned, by rank.

    Raises:
        AssertionError: with the traceback of a rank that failed, or the ranks that did not end.
    """
    context = multiprocessing.get_context("spawn")
    folder.mkdir(parents=True)
    processes = [context.Process(target=_enter, args=(work, rank, ranks, folder, arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + PATIENCE_S
    try:
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
        failed = [file.read_text() for file in sorted(folder.glob("*.failed"))]
        assert not failed, "\n".join(failed)
        hanging = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        assert not hanging, f"ranks {hanging} did not end within {PATIENCE_S} s"
    finally:
        for process in processes:
            if process.exitcode is None:
                process.kill()
            process.join()
    return [torch.load(folder / f"{rank}.result", weights_only=False) for rank in range(ranks)]


def _enter(work: Callable[..., Any], rank: int, ranks: int, folder: Path, arguments: tuple[Any, ...]) -> None:
    try:
        torch.set_num_threads(1)
        store = torch.distributed.FileStore(str(folder / "store"), ranks)
        timeout = timedelta(seconds=PATIENCE_S)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
        torch.save(work(rank, *arguments), folder / f"{rank}.result")
    except BaseException:
        (folder / f"{rank}.failed").write_text(f"rank {rank}: {traceback.format_exc()}")
        os._exit(1)  # at once: the others wait for this one, and a clean end would wait for them
