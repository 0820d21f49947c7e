"""Expert load balancing: ours against the published policies and the linear-program bound.

    python benchmarks/eplb.py [--quick] [--json FILE]

Compared are DeepInfer's policy (from its source distribution, downloaded once into .cache), and of the installed
SGLang ``deepseek`` and ``deepseek_vec``. Those split an expert's tokens evenly over its replicas. SGLang's LP dispatch
and its other algorithms need several GPUs or a CUDA kernel; ``published + LP`` stands for the former: the published
placements with every step split by an exact linear program.

A trace has three windows. Every policy places on the first, moves to a placement made from the second, and is scored on
the third, of which it has seen nothing. ``imbalance`` is the mean over steps and layers of the busiest rank's tokens
over the mean rank's, ``excess`` is imbalance - 1, bytes are those of the move. The bound is the least imbalance that
any split of our placement could have; it and ``published + LP`` are computed on a sample of steps and layers, and need
scipy, without which they are left out. Times are CPU times of one thread.

Traces are synthetic (seeded: 8192 tokens x 6 experts a step) and recorded from the trained small model of
examples/train_tiny, whose steps are pieces of held-out code and chat.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_plugin.eplb import policy
from deepinfer_plugin.eplb.balancer import CHUNK_BYTES, LINK, STEP_S
from deepinfer_plugin.eplb.decide import Request, decide
from deepinfer_plugin.eplb.policy import Split, lp_bound
from deepinfer_plugin.kernels import select
from deepinfer_plugin.model.expert_map import ExpertMap

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "deepinfer_policy"
SDIST, SHA256 = "deepinfer-0.1.0.tar.gz", "959b9bd010893b4c6dc60be0dd822e10e7f1ae1e53289233a83741f76c3d681a"
MEMBER = "deepinfer-0.1.0/deepinfer/model_executor/eplb/policy.py"

EXPERTS, TOKENS = 384, 8192 * 6
EXPERT_BYTES = 3 * 5120 * 2304 * 17 // 32  # three matrices of FP4 with a byte of scale for 32 values
SIZES = [
    (ranks, spare) for ranks in (8, 16, 64, 128) for spare in (0, 16, 32, 64, 128) if (EXPERTS + spare) % ranks == 0
]
TINY_SIZES = [(4, 0), (4, 4), (4, 8), (8, 0), (8, 8), (8, 16)]
SAMPLE = 8  # steps and layers for which linear programs are solved
FADE = 0.1  # of the newest step in the mean of earlier steps
SMALL = 0.01  # an excess of the bound below this counts as this, or nothing would be near it

Counts = NDArray[np.int64]  # [steps, layers, experts]
Placement = NDArray[np.int64]  # [layers, physical]


# ---- traces --------------------------------------------------------------------------------------------------------


def synthetic(kind: str, steps: int, layers: int, seed: int = 0) -> Counts:
    """[steps, layers, EXPERTS]. zipf: the expert that is number n in a layer's own order has popularity n^-0.5, and
    nothing changes. drift: the logarithm of each popularity walks by 0.02 a step. bursts: about ten experts of a layer
    are three times as popular as usual, each for 5 to 30 steps. topics: 512 running requests of about 100 steps have
    one of 24 topics, each with an order of its own and steeper (-0.8), which decides 70 % of the tokens."""
    random = np.random.default_rng([seed, *kind.encode()])

    def zipf(steepness: float, count: int = EXPERTS) -> NDArray[np.float64]:
        return random.permutation(np.arange(1, count + 1) ** -steepness)

    usual = np.stack([zipf(0.5) for _ in range(layers)])
    usual /= usual.sum(axis=1, keepdims=True)
    orders = np.stack([[zipf(0.8) for _ in range(24)] for _ in range(layers)])  # [layers, topics, experts]
    orders /= orders.sum(axis=2, keepdims=True)
    topics = zipf(1.0, 24)
    topics /= topics.sum()
    topic_of = random.choice(24, 512, p=topics)
    walk = np.zeros((layers, EXPERTS))
    left = np.zeros((layers, EXPERTS))
    counts = np.empty((steps, layers, EXPERTS), dtype=np.int64)
    for step in range(steps):
        popularity = usual
        if kind == "drift":
            walk += random.normal(0, 0.02, walk.shape)
            popularity = usual * np.exp(walk)
        elif kind == "bursts":
            begins = random.random(left.shape) < 0.0015
            left = np.where(begins, random.integers(5, 30, left.shape), left - 1)
            popularity = np.where(left > 0, 3 * usual, usual)
        elif kind == "topics":
            leaves = random.random(512) < 0.01
            topic_of[leaves] = random.choice(24, leaves.sum(), p=topics)
            popularity = 0.3 * usual + 0.7 * np.einsum("t,lte->le", np.bincount(topic_of, minlength=24) / 512, orders)
        counts[step] = random.multinomial(TOKENS, popularity / popularity.sum(axis=1, keepdims=True))
    return counts


def recorded(steps: int) -> Counts:
    """What the gates of the trained small model chose on pieces of 256 tokens, held-out code or chat at random."""
    example = ROOT / "examples" / "train_tiny"
    sys.path.insert(0, str(example))
    from batches import Batch
    from heldout import HeldOut
    from masters import load_masters
    from target import forward
    from training_ops import TrainingOps

    held_out, ops = HeldOut.load(example / "checkpoint"), TrainingOps()
    network = load_masters(example / "checkpoint", ops, "cpu", example / "checkpoint")
    network.dspark = None
    random = np.random.default_rng(0)
    chat = held_out.chat[: len(held_out.chat) // 256 * 256].reshape(-1, 256)
    texts = random.permutation(held_out.code.reshape(-1, 256)), random.permutation(chat)
    counts = []
    with torch.no_grad():
        network.prepare()
        for step in range(steps):
            text = texts[random.integers(2)]
            ops.loads = []
            rows = torch.from_numpy(text[step % len(text)]).long()[None]
            forward(network, ops, Batch(rows, rows, torch.ones(rows.shape)))
            counts.append(torch.stack([chosen for _, chosen in ops.loads]).numpy())
    return np.stack(counts)


# ---- policies ------------------------------------------------------------------------------------------------------


def fetch_policy() -> Path:
    """DeepInfer's policy.py out of its source distribution, which pip downloads and nothing installs.

    Raises:
        RuntimeError: the download failed, or it is not the file we know.
    """
    sdist, unpacked = CACHE / SDIST, CACHE / "policy.py"
    if not sdist.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
        command += ["--no-build-isolation", "--ignore-requires-python", "--dest", str(CACHE), "deepinfer==0.1.0"]
        # pip asks the distribution for its metadata, and that wants to be in an environment.
        environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode or not sdist.is_file():
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    if (found := hashlib.sha256(sdist.read_bytes()).hexdigest()) != SHA256:
        sdist.unlink()
        raise RuntimeError(f"{SDIST}: sha256 is {found}, expected {SHA256}")
    with tarfile.open(sdist) as archive:
        member = archive.extractfile(MEMBER)
        assert member is not None
        unpacked.write_bytes(member.read())
    return unpacked


def published() -> dict[str, Callable[[Counts, int, int], Placement]]:
    """Name -> (counts, physical, ranks) -> placement."""
    from sglang.srt.eplb.eplb_algorithms import deepseek, deepseek_vec

    spec = importlib.util.spec_from_file_location("deepinfer_policy", fetch_policy())
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)

    def deepinfer(counts: Counts, physical: int, ranks: int) -> Placement:
        return theirs.rebalance_experts_global(torch.from_numpy(counts), physical, physical // ranks)[0].numpy()

    def sglang(counts: Counts, physical: int, ranks: int) -> Placement:
        total = torch.from_numpy(counts.sum(axis=0))
        return deepseek.rebalance_experts(total, physical, None, 1, ranks, False)[0].numpy()

    def sglang_vec(counts: Counts, physical: int, ranks: int) -> Placement:
        steps = torch.from_numpy(counts)
        return deepseek_vec.rebalance_experts(steps, physical, physical // ranks, None, 1, False)[0].numpy()

    return {"DeepInfer": deepinfer, "deepseek": sglang, "deepseek_vec": sglang_vec}


# ---- figures -------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    trace: str
    ranks: int
    redundant: int
    published: dict[str, float]  # imbalance by policy
    published_lp: float | None  # the best of them, split by linear programs, on the sample
    ours: float  # split by each step's own counts
    ours_earlier: float  # ... by the fading mean of the steps before it
    ours_even: float  # ... evenly, which it is not made for
    for_even: float  # another placement of ours, made for an even split and split so: --eplb-algorithm deepinfer
    for_even_bytes: int
    served: float  # what the server's balancer makes of ``old`` (eplb/decide.py), split as it is; on the sample
    current: float  # what not moving would have given
    sample: float  # ours on the sample of the bound
    op: float  # ... split by ``Ops.assign_slots``, in whole tokens
    bound: float | None
    best: str  # of the published
    best_bytes: int
    bytes: int
    best_solve_s: float
    solve_s: float

    @property
    def excess_reduction(self) -> float:
        return 1 - (self.ours - 1) / (self.published[self.best] - 1)

    @property
    def excess_over_bound(self) -> float:
        return (self.sample - self.bound) / max(self.bound - 1, SMALL) if self.bound else float("nan")

    @property
    def bytes_ratio(self) -> float:
        return self.bytes / max(self.best_bytes, 1)


def peaks(counts: Counts, placement: Placement, ranks: int, by: str) -> NDArray[np.float64]:
    """[steps, layers] busiest over mean rank. by: even, own (each step is split by its own counts) or earlier (by the
    fading mean of the steps before it)."""
    split = Split.of(placement, counts.shape[2], ranks)
    tokens = torch.from_numpy(counts.transpose(1, 0, 2).copy()).float()
    weights = None
    if by == "own":
        weights = split.balance(tokens)
    elif by == "earlier":
        means = [tokens[:, 0]]
        for step in range(tokens.shape[1] - 1):
            means.append(means[-1] + FADE * (tokens[:, step] - means[-1]))
        weights = split.balance(torch.stack(means, dim=1))
    busiest = split.loads(tokens, weights).amax(dim=2).T.double().numpy()
    return busiest / (counts.sum(axis=2) / ranks)


def bounds(counts: Counts, placement: Placement, ranks: int) -> NDArray[np.float64]:
    """[steps, layers] the least that ``peaks`` could be."""
    least = [
        [lp_bound(tokens, placed, ranks) for tokens, placed in zip(step, placement, strict=True)] for step in counts
    ]
    return np.array(least) / (counts.sum(axis=2) / ranks)


def divided(counts: Counts, placement: Placement, ranks: int) -> NDArray[np.float64]:
    """[steps, layers] as ``peaks``, by the op that the server splits with."""
    ops, experts = select("cpu", "reference"), counts.shape[2]
    places = ExpertMap(placement, experts, ranks)
    busiest = np.empty(counts.shape[:2])
    for step, layer in np.ndindex(counts.shape[:2]):
        ids = torch.arange(experts).repeat_interleave(torch.from_numpy(counts[step, layer]))[:, None]
        slots = places.assign(ops, layer, ids)
        busiest[step, layer] = torch.bincount(slots.flatten() // places.slots, minlength=ranks).max()
    return busiest / (counts.sum(axis=2) / ranks)


def rearranged(seen: Counts, placement: Placement, ranks: int) -> Placement:
    """What the server's balancer makes of a placement after the steps ``seen``, with its own interval, chunk and
    link."""
    calls = -(-EXPERT_BYTES // CHUNK_BYTES) + 1
    found = decide(Request(seen, ranks, placement, None, 1000, STEP_S, CHUNK_BYTES / LINK, calls))
    moved = placement.copy()
    for move in (move for moves in found.rounds for move in moves):
        moved[move.layer, move.slot] = move.expert
    return moved


def moved_bytes(new: Placement, old: Placement, ranks: int) -> int:
    """Of the experts that ranks hold in ``new`` and did not in ``old``."""
    layers = len(new)
    ours, theirs = (half.reshape(layers, ranks, -1) for half in (new, old))
    missing = ~(ours[..., None] == theirs[..., None, :]).any(axis=3)
    return int(missing.sum()) * EXPERT_BYTES


def measure(trace: str, counts: Counts, ranks: int, spare: int) -> Case:
    physical = counts.shape[2] + spare
    first, second, third = np.array_split(counts, 3)
    steps = np.linspace(0, len(third) - 1, min(SAMPLE, len(third))).astype(int)
    layers = np.linspace(0, counts.shape[1] - 1, min(SAMPLE, counts.shape[1])).astype(int)
    some = third[steps][:, layers]

    theirs = {}
    for name, place in published().items():
        old = place(first, physical, ranks)
        start = time.process_time()
        new = place(second, physical, ranks)
        seconds = time.process_time() - start
        theirs[name] = new, float(peaks(third, new, ranks, "even").mean()), moved_bytes(new, old, ranks), seconds
    best = min(theirs, key=lambda name: theirs[name][1])

    old = policy.place(first, physical, ranks)
    start = time.process_time()
    new = policy.place(second, physical, ranks, current=old)
    solve_s = time.process_time() - start
    even_old = policy.place(first, physical, ranks, even_split=True)
    even = policy.place(second, physical, ranks, current=even_old, even_split=True)
    own = peaks(third, new, ranks, "own")
    scipy = importlib.util.find_spec("scipy") is not None
    return Case(
        trace,
        ranks,
        spare,
        {name: figures[1] for name, figures in theirs.items()},
        min(float(bounds(some, placed[layers], ranks).mean()) for placed, *_ in theirs.values()) if scipy else None,
        float(own.mean()),
        float(peaks(third, new, ranks, "earlier")[1:].mean()),
        float(peaks(third, new, ranks, "even").mean()),
        float(peaks(third, even, ranks, "even").mean()),
        moved_bytes(even, even_old, ranks),
        float(divided(some, rearranged(second, old, ranks)[layers], ranks).mean()),
        float(peaks(third, old, ranks, "own").mean()),
        float(own[np.ix_(steps, layers)].mean()),
        float(divided(some, new[layers], ranks).mean()),
        float(bounds(some, new[layers], ranks).mean()) if scipy else None,
        best,
        theirs[best][2],
        moved_bytes(new, old, ranks),
        theirs[best][3],
        solve_s,
    )


def worst(cases: list[Case]) -> dict[str, float]:
    spare = [case for case in cases if case.redundant]
    none = [case for case in cases if not case.redundant]
    return {
        "excess_reduction_vs_best": min(case.excess_reduction for case in spare),
        "excess_over_bound": max(case.excess_over_bound for case in spare),
        "bytes_ratio_vs_best": max(case.bytes_ratio for case in spare),
        "solve_s": max(case.solve_s for case in cases),
        "for_even_vs_best": max(case.for_even / case.published[case.best] for case in cases),
        "no_redundancy_vs_best": max(case.ours / case.published[case.best] for case in none),
        "no_redundancy_vs_current": max(case.ours / case.current for case in none),
    }


def cases(quick: bool) -> Iterator[Case]:
    steps, layers = (60, 4) if quick else (300, 40)
    for kind in ("zipf", "drift", "bursts", "topics"):
        counts = synthetic(kind, steps, layers)
        for ranks, spare in SIZES:
            yield measure(kind, counts, ranks, spare)
    counts = recorded(30 if quick else 120)
    for ranks, spare in TINY_SIZES:
        yield measure("recorded", counts, ranks, spare)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 layers and 20 steps a window instead of 40 and 100")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if importlib.util.find_spec("scipy") is None:
        print("scipy is not installed: no bound, no published + LP")
    theirs = ("DeepInfer", "deepseek", "ds_vec", "best+LP")
    names = (*theirs, "for even", "served", "even", "ours", "earlier", "op", "bound")
    print(f"{'trace':>8} ranks spare | " + " ".join(f"{name:>9}" for name in names) + " | excess bytes |  GB    s")
    found = []
    for case in cases(arguments.quick):
        found.append(case)
        ours = case.for_even, case.served, case.ours_even, case.ours, case.ours_earlier, case.op, case.bound
        columns = [*case.published.values(), case.published_lp, *ours]
        print(
            f"{case.trace:>8} {case.ranks:>5} {case.redundant:>5} | "
            + " ".join(f"{value:>9.3f}" if value else f"{'-':>9}" for value in columns)
            + f" | {-case.excess_reduction:>+6.0%} {case.bytes_ratio:>5.2f}"
            + f" | {case.bytes / 1e9:>3.0f} {case.solve_s:>4.2f}",
            flush=True,
        )
    figures = worst(found)
    print("worst " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({**figures, "cases": [asdict(case) for case in found]}, file, indent=2)


if __name__ == "__main__":
    main()
