"""Two ranks on two GPUs of a host: a cut network of the released layers' shapes, captured and op by op, and how fast
experts move between them.

    python benchmarks/ranks_gpu.py [--rows 64,256] [--experts 384] [--replays 20] [--json FILE]

Six layers, one of each kind, random weights, the same however they are divided; a small Engram table. Every form runs
the same rows after 4,096 tokens each: on one rank that has everything (``EP1``, no exchange), and on two that divide
experts (``EP2``), heads too (``TP2xEP2``), or rows and experts (``DP2xEP2``, each rank half of the rows). Milliseconds
are medians of the slower rank: of replays of a captured step with its logits, and of the same step op by op.
``equal``: logits and hidden states are those of one rank, to the bit; not where heads are divided, because how the
products of a GPU split their sums depends on how many outputs they have.

Experts move as in a server, a chunk between two steps: bytes a second that leave a rank while chunks travel, for two
sizes of a chunk, beside NCCL sending and receiving 256 MiB at a time and one GPU copying them to the other. ``--tiny``
runs all of it on a CPU with gloo, to see that it runs.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import step
import torch
import torch.distributed as dist
from cuda_timing import machine
from torch import Tensor

from deepinfer_plugin.eplb.migration import Move
from deepinfer_plugin.eplb.mover import Mover
from deepinfer_plugin.kernels import select
from deepinfer_plugin.model.captured import Captured, Peers
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.memory import PageLayout, PagePool, StateLayout, StatePool
from deepinfer_plugin.model.network import Network
from deepinfer_plugin.model.parallel import Alone, Parallel, Ranks, Single
from deepinfer_plugin.model.profiles import profile_named
from deepinfer_plugin.model.released import RELEASED
from deepinfer_plugin.model.rows import Rows
from deepinfer_plugin.model.torch_group import TorchGroup
from deepinfer_plugin.runtime.graphs import Graphs, StepGraphs

RANKS, EACH, CONTEXT, LINK_BYTES = 2, 4, 4096, 256 << 20
CUT = {
    "num_hidden_layers": 6,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 5],
    "candidate_source_layer_id": 4,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [480000],
    "dspark_target_layer_ids": [3, 4, 5],
}


@dataclass(frozen=True)
class Form:
    """``size``: ranks of an attention group; ``heads``, ``experts``: whether they are divided."""

    size: int = RANKS
    heads: bool = True
    experts: bool = True


FORMS = {
    "EP1": None,
    "TP2": Form(experts=False),
    "EP2": Form(heads=False),
    "TP2xEP2": Form(),
    "DP2xEP2": Form(size=1, heads=False),
}


def cut(experts: int) -> V41Config:
    """The released config with six layers, one of each kind, and so many experts."""
    config: Any = copy.deepcopy(RELEASED)
    config["text_config"] |= CUT | {"n_routed_experts": experts}
    return V41Config.from_dict(config)


# ---- ranks -----------------------------------------------------------------------------------------------------------


def run(work: Callable[..., Any], device: str, *arguments: Any) -> list[Any]:
    """What ``work(rank, device, *arguments)`` returns in each of two processes.

    Raises:
        RuntimeError: with the traceback of a rank that failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            context.Process(target=_enter, args=(work, rank, device, folder, arguments)) for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        while any(process.exitcode is None for process in processes):
            if any(process.exitcode for process in processes):  # the others wait for it
                for process in processes:
                    process.kill()
            time.sleep(0.05)
        if failed := [file.read_text() for file in sorted(folder.glob("*.failed"))]:
            raise RuntimeError("\n".join(failed))
        return [torch.load(folder / f"{rank}.result", weights_only=False) for rank in range(RANKS)]


def _enter(work: Callable[..., Any], rank: int, device: str, folder: Path, arguments: tuple[Any, ...]) -> None:
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        store = dist.FileStore(str(folder / "store"), RANKS)
        dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS)
        with torch.inference_mode():
            torch.save(work(rank, device, *arguments), folder / f"{rank}.result")
    except BaseException:
        (folder / f"{rank}.failed").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise


def peers_of(group: TorchGroup, device: str) -> Peers:
    if device == "cuda":
        from deepinfer_plugin.kernels.cuda.peers import PeerMemory

        return PeerMemory(group.device_group, torch.device("cuda", group.rank))
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tests.parallel.peers import GatheredPeers

    return GatheredPeers(group)


class Repeats:
    """In the place of ``Graphs`` on a device without any."""

    def capture(self, work: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        results = work()

        class Graph:
            def replay(self) -> None:
                results.copy_(work())

        return Graph(), results


def parallel_of(form: Form | None, world: TorchGroup, peers: Peers) -> Parallel:
    if form is None:
        return Single()
    group = world if form.size > 1 else Alone()
    fixed = partial(Captured, peers=peers)
    return Ranks(group, world, split_heads=form.heads, split_experts=form.experts, fixed=fixed)


# ---- the network -----------------------------------------------------------------------------------------------------


def build(config: V41Config, parallel: Parallel, device: str) -> Network:
    """With random weights that depend on their names alone, laid out."""
    torch.manual_seed(0)
    table, profile = step.random_table(config), profile_named("model")
    ops = select(device, "auto" if device == "cuda" else "reference", profile="model")
    with torch.device("meta"):
        whole = {name: value.shape for name, value in Network(config, ops, profile, table).parameter_slices().items()}
    with torch.device(device):
        network = Network(config, ops, profile, table, parallel)
    generator = torch.Generator(device)
    for name, view in network.parameter_slices().items():
        generator.manual_seed(zlib.crc32(name.encode()))
        part = parallel.place.part(name, whole[name][0], config)
        assert part is not None
        view.copy_(_random(name, view.dtype, whole[name], generator)[part.start : part.stop])
    network.prepare()
    return network


def _random(name: str, dtype: torch.dtype, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """As in ``step.build``."""
    value = torch.empty(shape, dtype=dtype, device=generator.device)
    if dtype == torch.int8:
        value.random_(-128, 128, generator=generator)
    elif dtype == torch.float8_e4m3fn:
        value.view(torch.uint8).random_(0, 256, generator=generator).bitwise_and_(0xB7)
    elif dtype == torch.float8_e8m0fnu:
        value.view(torch.uint8).random_(119, 122, generator=generator)
    elif "norm" in name:
        value.fill_(1)
    else:
        value.normal_(std=0.02, generator=generator)
    return value


class Memories:
    """Pages and state of requests that have run ``CONTEXT`` tokens, as random as the weights."""

    def __init__(self, config: V41Config, requests: int, device: str):
        torch.manual_seed(1)
        self.pages = PagePool.allocate(
            PageLayout.of(config, step.PAGE), 1 + requests * -(-CONTEXT // step.PAGE), device
        )
        self.pages.pages.random_(0, 256).bitwise_and_(0x77)
        self.state = StatePool(StateLayout.of(config), requests + 1, device)
        self.before = self.pages.pages.clone()

    def reset(self) -> None:
        self.pages.pages.copy_(self.before)
        self.state.rings.zero_()
        self.state.tails.zero_()
        self.state.reset(torch.arange(self.state.rings.shape[1], device=self.before.device))

    def rows(self, config: V41Config, count: int, at: int, tokens: Tensor | None = None) -> Rows:
        """``EACH`` rows of every request, ``at`` steps before the end of the context; tokens int64 [count]."""
        device, requests = self.before.device, count // EACH
        columns = -(-CONTEXT // step.PAGE)
        generator = torch.Generator(device).manual_seed(2)
        table = torch.randperm(requests * columns, device=device, generator=generator).view(requests, columns) + 1
        if tokens is None:
            tokens = torch.randint(config.vocab_size, (count,), device=device, generator=generator)
        starts = [CONTEXT - EACH * (at + 1)] * requests
        return Rows.build(tokens, starts, [EACH] * requests, list(range(1, requests + 1)), table)


def part_of(rows: Rows, first: int, end: int) -> Rows:
    """The rows of requests ``first`` .. ``end`` - 1."""
    own, mine = slice(first, end), slice(first * EACH, end * EACH)
    return Rows(
        token_ids=rows.token_ids[mine],
        positions=rows.positions[mine],
        requests=rows.requests[mine] - first,
        cu_rows=rows.cu_rows[first : end + 1] - mine.start,
        slots=rows.slots[own],
        page_table=rows.page_table[own],
        window_floor=rows.window_floor[mine],
        writes_pages=rows.writes_pages[mine],
    )


# ---- what is measured ------------------------------------------------------------------------------------------------


def median_ms(world: TorchGroup, work: Callable[[], Any], replays: int, device: str) -> float:
    """Of the slower rank, all of which begin together; whatever waits for the host counts."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    work()
    times = []
    for _ in range(replays):
        wait()
        world.host_gather([0])
        begin = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begin)
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist()) * 1e3


def steps(
    world: TorchGroup, device: str, config: V41Config, counts: list[int], forms: list[str], replays: int
) -> dict[str, Any]:
    """Milliseconds and bits of every form with every number of rows."""
    peers, found, rank = peers_of(world, device), {}, world.rank
    memories = Memories(config, max(counts) // EACH, device)
    alone: dict[int, list[Tensor]] = {}
    for name in forms:
        form = FORMS[name]
        begin = time.perf_counter()
        parallel = parallel_of(form, world, peers)
        network = build(config, parallel, device)
        built = time.perf_counter() - begin
        index, parts = (rank, RANKS) if form is not None and form.size == 1 else (0, 1)
        for count in counts:
            own = count // parts
            mine = slice(index * own, (index + 1) * own)
            requests = mine.start // EACH, mine.stop // EACH
            graphs: Any = Graphs() if device == "cuda" else Repeats()
            widths = (-(-CONTEXT // step.PAGE),)
            stepping = StepGraphs(graphs, network, memories.pages, memories.state, (own,), widths)
            seconds = f"{name}: built in {built:.1f} s, captured in {time.perf_counter() - begin - built:.1f} s"
            print(f"rank {rank}, {seconds}", file=sys.stderr, flush=True)

            def eager(rows: Rows, network: Network = network) -> Tensor:
                return network(rows, memories.pages, memories.state)

            one: dict[str, Any] = {}
            for way, forward in (("captured", stepping), ("op by op", eager)):
                memories.reset()
                tokens, results = None, []
                for at in (2, 1, 0):  # three steps, each of the tokens of the last one
                    rows = memories.rows(config, count, at, tokens)
                    hidden = forward(part_of(rows, *requests))
                    logits = network.logits(hidden)
                    results += [hidden, logits]
                    tokens = logits.argmax(-1)
                    if parts > 1:
                        tokens = world.all_gather(tokens).flatten()
                wanted = alone.setdefault(count, results)
                one[f"{way} equal"] = all(
                    torch.equal(ours, theirs[mine]) for ours, theirs in zip(results, wanted, strict=True)
                )
                one["finite"] = one.get("finite", True) and all(bool(each.isfinite().all()) for each in results)
                rows = part_of(memories.rows(config, count, 0), *requests)
                work = partial(_with_logits, network, forward, rows)
                one[f"{way} ms"] = median_ms(world, work, replays, device)
            everybody = world.host_gather([bool(one[key]) for key in one if " ms" not in key])
            one |= zip([key for key in one if " ms" not in key], map(all, zip(*everybody, strict=True)), strict=True)
            found[f"{name}, {count}"] = one
            if rank == 0:
                print(
                    f"| {name}, {count} | {one['captured ms']:.2f} | {one['op by op ms']:.2f} | "
                    f"{one['captured equal']} | {one['op by op equal']} |" + " not finite" * (not one["finite"]),
                    flush=True,
                )
            del stepping, graphs
        del network
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def _with_logits(network: Network, forward: Callable[[Rows], Tensor], rows: Rows) -> Tensor:
    return network.logits(forward(rows))


def seconds_of(world: TorchGroup, work: Callable[[], Any], device: str) -> float:
    """Of work that is queued behind other work, as between two steps: launching it costs nothing. Of the slower rank,
    both of which come to it together."""
    world.host_gather([0])
    if device == "cuda":
        torch.cuda._sleep(2_000_000)  # a millisecond
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        took = torch.tensor(begin.elapsed_time(end) * 1e-3)
    else:
        start = time.perf_counter()
        work()
        took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def moving(world: TorchGroup, device: str, config: V41Config, chunks: list[int]) -> dict[str, float]:
    """Bytes a second that leave a rank, both sending: experts in chunks, and what the link can do."""
    rank, found = world.rank, {}
    few = dataclasses.replace(config, experts=min(config.experts, 16))
    network = build(few, Ranks(world, world, split_heads=False), device)
    experts, places = network.layers[0].ffn.experts, next(iter(network.expert_maps.values()))
    size = LINK_BYTES if device == "cuda" else 1 << 20
    ours, theirs = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    for chunk in chunks:
        mover = Mover([experts], places, world, chunk)
        carrying: list[float] = []
        placing: list[float] = []
        sent: list[int] = []

        def carry(mover: Mover = mover, sent: list[int] = sent) -> None:
            sent.append(mover.step() // RANKS)

        for _ in range(4):  # the first warms up
            held = places.placement[0].reshape(RANKS, -1)
            a, b = int(held[0, 0]), int(held[1, 0])
            mover.begin([[Move(0, a, 0, places.slots), Move(0, b, places.slots, 0)]])
            while mover.busy:
                took = seconds_of(world, carry, device)
                (carrying if sent[-1] else placing).append(took)
        if max(sent) > chunk:
            raise AssertionError(f"{max(sent)} bytes at a time, bound {chunk}")
        each, sizes = mover.calls_per_round - 1, [count for count in sent if count]
        name = f"chunks of {chunk >> 10} KiB"
        later = [at for at in range(each, len(carrying)) if at % each]  # the first chunk of an expert reads it too
        found[f"experts, {name}"] = statistics.median(sizes[at] / carrying[at] for at in later)
        found[f"first chunk and reading ms, {name}"] = statistics.median(carrying[each::each]) * 1e3
        found[f"placing ms, {name}"] = statistics.median(placing[1:]) * 1e3
        mine, yours = ours[:chunk], theirs[:chunk]
        counts = ([0, len(mine)], [len(mine), 0])[rank]

        def exchange(mine: Tensor = mine, yours: Tensor = yours, counts: list[int] = counts) -> None:
            dist.all_to_all_single(yours, mine, counts, counts)

        times = [seconds_of(world, exchange, device) for _ in range(8)]
        found[f"NCCL all to all, {name}"] = len(mine) / statistics.median(times[1:])

    def both() -> None:
        pair = [dist.P2POp(dist.isend, ours, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
        for each in dist.batch_isend_irecv(pair):
            each.wait()

    found["NCCL send and receive"] = size / statistics.median([seconds_of(world, both, device) for _ in range(6)][1:])
    if device == "cuda":
        from torch.distributed import _symmetric_memory

        shared = _symmetric_memory.empty(size, dtype=torch.uint8, device=torch.device("cuda", rank))
        there = _symmetric_memory.rendezvous(shared, dist.group.WORLD).get_buffer(1 - rank, (size,), torch.uint8)
        times = [seconds_of(world, lambda: there.copy_(ours), device) for _ in range(6)]
        found["copy to the other GPU"] = size / statistics.median(times[1:])
    return found


def measure(
    rank: int, device: str, config: V41Config, counts: list[int], forms: list[str], replays: int
) -> dict[str, Any]:
    """All of it; rank 0 prints."""
    world = TorchGroup()
    if rank == 0 and device == "cuda":
        print(f"{machine()}, peer access {torch.cuda.can_device_access_peer(0, 1)}", flush=True)
    link = moving(world, device, config, [1 << 20, 4 << 20, 9 << 20] if device == "cuda" else [4 << 10, 7 << 10])
    if rank == 0:
        for name, value in link.items():
            print(f"{name:44} {value:8.3f}" if " ms" in name else f"{name:44} {value / 1e9:8.1f} GB/s", flush=True)
        print("| form, rows | captured ms | op by op ms | equal | equal |\n|" + " --- |" * 5, flush=True)
    return {"link": link, "steps": steps(world, device, config, counts, forms, replays)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="64,256")
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--forms", default="EP1,EP2,TP2xEP2,DP2xEP2")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a tiny network on a CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = "cpu" if args.tiny else "cuda"
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        print(f"{torch.cuda.device_count()} GPUs; {RANKS} are needed", file=sys.stderr)
        return 2
    config = tiny() if args.tiny else cut(args.experts)
    counts = [int(number) for number in args.rows.split(",")]
    found = run(measure, device, config, counts, args.forms.split(","), args.replays)[0]
    if args.json:
        args.json.write_text(json.dumps({"experts": config.experts, **found}, indent=1) + "\n")
    whole = [one for name, one in found["steps"].items() if not name.startswith("TP")]
    return 0 if all(value for one in whole for name, value in one.items() if " ms" not in name) else 1


def tiny() -> V41Config:
    from deepinfer_plugin.model.tiny import write_tiny

    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder))
        return V41Config.load(Path(folder))


if __name__ == "__main__":
    sys.exit(main())
