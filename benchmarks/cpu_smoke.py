"""Cold numbers of a server on this machine's CPU: how long until it answers, how fast it decodes, how much memory it
takes.

    python benchmarks/cpu_smoke.py [--json FILE] [--model-path DIR]

Starts the server once to warm the file cache and once more to measure. Without --model-path a tiny checkpoint is
written first. ``decode_tokens_per_s`` is one greedy stream; ``peak_rss_bytes`` is the resident memory summed over all
processes of the server, pages that they share counted in each, sampled twice a second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import requests

from deepinfer_plugin.local_server import LocalServer
from deepinfer_plugin.model.tiny import write_tiny

PROMPT, NEW, CONCURRENT = 128, 96, 8


class PeakMemory:
    """Samples a server's memory until stopped."""

    def __init__(self, server: LocalServer):
        self.server, self.peak, self.done = server, 0, threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.done.wait(0.5):
            self.peak = max(self.peak, self.server.rss_bytes())

    def stop(self) -> int:
        self.done.set()
        self.thread.join()
        return self.peak


def generate(url: str, seed: int) -> tuple[int, float]:
    """One greedy request: output tokens after the first, and the seconds they took."""
    ids = [10 + (seed * 7919 + 31 * i) % 900 for i in range(PROMPT)]
    params = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    first, last = 0.0, time.perf_counter()
    body = {"input_ids": ids, "sampling_params": params, "stream": True}
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=600) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                last = time.perf_counter()
                first = first or last
    return NEW - 1, last - first


def measure(url: str) -> dict[str, float]:
    generate(url, 0)
    tokens, seconds = generate(url, 1)
    started = time.perf_counter()
    with ThreadPoolExecutor(CONCURRENT) as pool:
        list(pool.map(lambda seed: generate(url, seed), range(2, 2 + CONCURRENT)))
    together = CONCURRENT * NEW / (time.perf_counter() - started)
    return {"decode_tokens_per_s": tokens / seconds, f"tokens_per_s_{CONCURRENT}_concurrent": together}


def tree_bytes(root: Path) -> int:
    return sum(file.lstat().st_size for file in root.rglob("*") if not file.is_dir())


def where() -> dict[str, str]:
    """Date, machine and versions of a measurement."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        **{name: metadata.version(name) for name in ("sglang", "torch", "deepinfer_plugin")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if args.model_path is None:
            args.model_path = os.path.join(scratch, "tiny")
            write_tiny(args.model_path)
        log = os.path.join(scratch, "server.log")
        with LocalServer(args.model_path, log=log) as server:
            cold = server.ready_s
        with LocalServer(args.model_path, log=log) as server:
            memory = PeakMemory(server)
            figures = {"ready_s": server.ready_s, "first_ready_s": cold, **measure(server.url)}
            figures["peak_rss_bytes"] = memory.stop()
    figures["venv_bytes"] = tree_bytes(Path(sys.prefix))
    for name, value in {**where(), **figures}.items():
        print(f"{name:24s} {value:,.1f}" if isinstance(value, float) else f"{name:24s} {value}")
    if args.json:
        Path(args.json).write_text(json.dumps({**figures, "where": where()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
