"""Timing of GPU work: medians of CUDA-graph replays, so that launches cost what they cost in a served step."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

BANDWIDTH, BF16_RATE = 4.3e12, 790e12  # bytes and bf16 operations a second, measured on an H200


def floor_us(bytes_: float, flops: float) -> float:
    """Microseconds that the larger of the bytes to move and the operations to do take at least."""
    return max(bytes_ / BANDWIDTH, flops / BF16_RATE) * 1e6


def relative(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected, where that is finite."""
    seen = expected.isfinite()
    got, want = actual[seen].double(), expected[seen].double()
    return ((got - want).norm() / want.norm().clamp(min=1e-300)).item()


def sweep(
    doc: str | None,
    benchmarks: Mapping[str, Callable[[int], Iterable[Any]]],
    row_counts: Sequence[int],
    measure: Callable[[str, int, Any], tuple[str, float, float, float, float]],
) -> int:
    """The command of a script with one benchmark per op, row count -> calls: a line for each call.

    measure: (op, rows, call) -> (shape, microseconds, bytes, operations, error).
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(benchmarks), help=f"ops, of {', '.join(benchmarks)}")
    parser.add_argument("--rows", default=",".join(map(str, row_counts)))
    args = parser.parse_args()
    torch.manual_seed(0)
    print(machine())
    print(f"{'op':18} {'shape':26} {'rows':>5} {'us':>9} {'GB/s':>8} {'floor':>9} {'x floor':>8} {'error':>9}")
    for op in args.only.split(","):
        for rows in map(int, args.rows.split(",")):
            for call in benchmarks[op](rows):
                shape, us, bytes_, flops, error = measure(op, rows, call)
                rate, floor = bytes_ / us * 1e-3, floor_us(bytes_, flops)
                line = f"{op:18} {shape:26} {rows:5} {us:9.2f} {rate:8.1f} {floor:9.2f} {us / floor:8.2f} {error:9.1e}"
                print(line, flush=True)
                del call
                torch.cuda.empty_cache()
    return 0


def graph_us(fn: Callable[..., Any], variants: Sequence[Any] = ((),), calls: int = 8, replays: int = 20) -> float:
    """Microseconds of one call: the median of ``replays`` of a graph of at least ``calls`` calls.

    Calls follow each other in the graph, so kernels that may begin before the one before has ended do, as in a step.

    Args:
        variants: argument tuples to rotate through, so that a weight does not stay in the cache between calls.
    """
    for variant in variants:
        fn(*variant)
    rounds = -(-calls // len(variants))

    def work() -> None:
        for _ in range(rounds):
            for variant in variants:
                fn(*variant)

    return replay_ms(captured(work), replays) * 1e3 / (rounds * len(variants))


def captured(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """The graph of ``work``, all of whose kernels have been compiled by an earlier call."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Milliseconds of a replay: the median, after one that does not count."""
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
    return statistics.median(times)


class Parts:
    """What the parts of a step take, by events inside its graph: who launches says which part is next.

    An event is recorded where the part changes. It costs about a microsecond, and kernels do not overlap across it, so
    parts add up to more than the step does without them. Work that names no part counts with what was launched before
    it.
    """

    def __init__(self) -> None:
        self.marks: list[tuple[str, torch.cuda.Event]] | None = None

    def next(self, name: str) -> None:
        if self.marks is None or (self.marks and self.marks[-1][0] == name):
            return
        event = torch.cuda.Event(enable_timing=True, external=True)  # external: a node of the graph, timed by replays
        event.record()
        self.marks.append((name, event))

    @contextlib.contextmanager
    def whole(self, name: str) -> Iterator[None]:
        """All that is launched inside is one part, whatever it calls itself."""
        self.next(name)
        marks, self.marks = self.marks, None
        try:
            yield
        finally:
            self.marks = marks

    def measure(self, work: Callable[[], Any], replays: int) -> dict[str, float]:
        """Milliseconds of each part of ``work``, the median."""

        def marked() -> None:
            self.marks = marks
            try:
                work()
                self.next("")
            finally:
                self.marks = None

        marks: list[tuple[str, torch.cuda.Event]] = []
        try:
            graph = captured(marked)
            graph.replay()
            torch.cuda.synchronize()
            marks[0][1].elapsed_time(marks[-1][1])
        except RuntimeError as reason:
            print(f"no parts: {reason}"[:300])
            return {}
        totals: dict[str, list[float]] = {}
        for _ in range(replays):
            graph.replay()
            torch.cuda.synchronize()
            one: dict[str, float] = {}
            for (name, start), (_, end) in itertools.pairwise(marks):
                one[name] = one.get(name, 0.0) + start.elapsed_time(end)
            for name, ms in one.items():
                totals.setdefault(name, []).append(ms)
        return {name: statistics.median(ms) for name, ms in totals.items()}


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
