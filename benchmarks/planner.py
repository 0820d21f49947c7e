"""Time of one plan: choosing the total on the host, and splitting it on the device.

    python benchmarks/planner.py [--device cpu] [--json FILE]

``plan_us_512x5`` is both together for 512 requests of 5 drafts, one CPU thread, the median of many runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from deepinfer_plugin.speculative.planner import Planner, allocate, survival
from deepinfer_plugin.speculative.step_cost import Curve, StepCost

BLOCK = 5


def microseconds(run: Callable[[], object], device: str, runs: int = 300) -> float:
    times = []
    for _ in range(runs + 20):
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[20:]) * 1e6


def measure(requests: int, device: str) -> tuple[float, float, int]:
    """Microseconds on the host, microseconds on the device, rows."""
    random = np.random.default_rng(requests)
    confidences = random.beta(4, 1.5, (requests, BLOCK)).astype(np.float32)
    tokens = random.integers(100, 100_000, requests)
    rows = tuple(range(8, 3081, 8))
    curve = Curve(
        rows, tuple(0.01 + 5e-5 * count for count in rows), padded=True, row_context=3e-9, request_context=0.0
    )
    planner = Planner(StepCost(curve), BLOCK)
    lagged = confidences.cumprod(axis=1)
    newest = torch.from_numpy(confidences).to(device)
    lengths = torch.from_numpy(tokens).to(device)
    planner.plan(lagged, tokens)  # the first one has no price yet
    plan = planner.plan(lagged, tokens)

    def split() -> torch.Tensor:
        return allocate(survival(newest)[0], plan.total, contexts=lengths, price=plan.price)

    return microseconds(lambda: planner.plan(lagged, tokens), device), microseconds(split, device), plan.total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where the total is split")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    print(f"{'requests':>8} {'host us':>9} {'split us':>9} {'rows':>6}")
    for requests in (1, 16, 64, 512):
        host, split, rows = measure(requests, arguments.device)
        figures[f"plan_us_{requests}x{BLOCK}"] = round(host + split, 1)
        print(f"{requests:>8} {host:>9.1f} {split:>9.1f} {rows:>6}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
