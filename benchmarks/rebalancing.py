"""How much longer a step takes while experts move: two ranks on the trained small model, one pinned thread each.

    python benchmarks/rebalancing.py [--steps 240] [--repeats 5] [--json FILE]

Both ranks decode the same prompt with divided experts; every 20 steps some move at random, one that leaves and one that
arrives at a time, as in a server. The same run is repeated, and of each step the shortest time counts: what is left is
what the step itself needs. What to move is known before: a server works it out in another process.

``stall_ratio``: the longest step while experts move over the median of those in which none does, of the slower rank.
``resting_ratio``: the longest of these over the same median; what is above 1 in it is not the balancer's. ``..._cpu``:
the same of processor time, of which waiting for the other rank and for other processes of the machine is no part.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from deepinfer_plugin.eplb.balancer import Balancer, Terms
from deepinfer_plugin.eplb.decide import Decision, Request, shuffle
from deepinfer_plugin.model import V41
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.layout import Layout, expert_sets
from deepinfer_plugin.model.parallel import Ranks
from deepinfer_plugin.model.torch_group import TorchGroup

CHECKPOINT = Path(__file__).resolve().parents[1] / "examples" / "train_tiny" / "checkpoint"
RANKS, REDUNDANT, INTERVAL = 2, 4, 20
CHUNK_BYTES = 4 << 20  # of a server


@dataclass
class Known:
    """A ``Solver`` whose answers lie ready."""

    answers: list[Decision] = field(default_factory=list)

    def ask(self, request: Callable[[], Request]) -> None:
        pass

    def answer(self) -> Decision:
        return self.answers.pop(0)


def migrations(config: V41Config, layout: Layout, count: int) -> list[Decision]:
    """Random ones of the network's experts, each from where the one before ends."""
    layers, experts = expert_sets(config)["target"]
    placed, found = layout.target.copy(), []
    for seed in range(count):
        nobody = np.zeros((1, layers, experts), dtype=np.int32)
        found.append(shuffle(Request(nobody, RANKS, placed, None, INTERVAL, 0.0, 0.0, 1), seed))
        for moves in found[-1].rounds:
            for move in moves:
                placed[move.layer, move.slot] = move.expert
    return found


def decode(steps: int) -> list[tuple[float, float, bool]]:
    """Of every step: seconds, seconds of the processor, and whether experts moved."""
    config = V41Config.load(CHECKPOINT)
    layout, world = Layout.trivial(config, RANKS, REDUNDANT), TorchGroup()
    model = V41.load(CHECKPOINT, parallel=Ranks(world, world, layout=layout))
    answers = migrations(config, layout, steps // INTERVAL + 1)
    balancer = Balancer(model.network, Terms(INTERVAL, CHUNK_BYTES), lambda: Known(answers))
    session = model.session(64 + steps)
    session.extend(list(range(100, 132)))
    balancer.start()
    found = []
    for _ in range(steps):
        token = session.next_token()
        moving = balancer.sets["target"].mover.busy
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        session.extend([token])
        found.append((time.perf_counter() - begin, time.process_time() - cpu, moving))
    return found


def work(rank: int, folder: str, steps: int, repeats: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    found = [decode(steps) for _ in range(repeats)]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def measure(steps: int = 240, repeats: int = 5) -> dict[str, Any]:
    """``stall_ratio`` and what it is made of, in seconds."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=work, args=(rank, folder, steps, repeats)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"ranks ended with exit codes {[process.exitcode for process in processes]}")
        found = np.array([json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)])
    shortest, moving = found[..., :2].min(axis=1), found[0, 0, :, 2] > 0  # [ranks, steps, 2], [steps]
    longest, median = shortest[:, moving].max(axis=1), np.median(shortest[:, ~moving], axis=1)
    ratio, ratio_cpu = (longest / median).max(axis=0).tolist()
    resting = (shortest[:, ~moving].max(axis=1) / median).max(axis=0).tolist()
    slower = int((longest / median)[:, 0].argmax())
    return {
        "stall_ratio": ratio,
        "stall_ratio_cpu": ratio_cpu,
        "resting_ratio": resting[0],
        "resting_ratio_cpu": resting[1],
        "longest_s": float(longest[slower, 0]),
        "median_s": float(median[slower, 0]),
        "steps": steps,
        "steps_moving": int(moving.sum()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = measure(args.steps, args.repeats)
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
