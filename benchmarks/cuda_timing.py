"""Timing of GPU work: medians of CUDA-graph replays, so that launches cost what they cost in a served step."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch


def graph_us(fn: Callable[..., Any], variants: Sequence[Any] = ((),), calls: int = 8, replays: int = 20) -> float:
    """Microseconds of one call: the median of ``replays`` of a graph of at least ``calls`` calls.

    Args:
        variants: argument tuples to rotate through, so that a weight does not stay in the cache between calls.
    """
    for variant in variants:
        fn(*variant)
    torch.cuda.synchronize()
    rounds = -(-calls // len(variants))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for variant in variants:
                fn(*variant)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3 / (rounds * len(variants))


def machine() -> dict[str, str]:
    """Date, device and versions: what every log of a measurement begins with."""
    import triton

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "",
    }
