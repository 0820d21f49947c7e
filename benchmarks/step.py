"""A whole step of one rank on one NVIDIA GPU: random weights of the real shapes, no exchange between ranks.

    python benchmarks/step.py CONFIG [--ranks 8] [--rows 64,256] [--context 4096,32768] [--each 4] [--json FILE]

CONFIG is the config.json of a checkpoint. ``--ranks``: expert-parallel ranks, of which this one holds its share of the
experts (a row chooses as many of them as its choices and those of the other ranks' rows would send here) and of the
Engram tables. ``--each``: rows of a request, its newest token and the drafts that are verified with it.

Milliseconds are medians of replays of graphs as a server captures them, with page tables as wide as the context:
verification with its logits, then drafting. The baseline is the same step launched op by op, in the same run. The floor
is what the weights and the caches must move over 4.3 TB/s, or what the products need at 790 TFLOP/s (bf16) where
that is more, part by part, both measured on an H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
from cuda_timing import floor_us, machine
from torch import nn

from deepinfer_plugin.kernels import select
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.engram_table import EngramTable
from deepinfer_plugin.model.layers import Dense, GroupedLinear, JoinedLinear, Linear
from deepinfer_plugin.model.memory import PageLayout, PagePool, StateLayout, StatePool
from deepinfer_plugin.model.moe import Experts
from deepinfer_plugin.model.network import Network
from deepinfer_plugin.model.profiles import profile_named
from deepinfer_plugin.model.rows import Rows
from deepinfer_plugin.runtime.graphs import DraftGraphs, EagerDraft, Graphs, StepGraphs

PAGE = 128


def share(config: V41Config, ranks: int) -> V41Config:
    """The config of one rank's network: its experts, its part of the Engram tables."""
    changed = {"experts": config.experts // ranks}
    if config.dspark is not None:
        changed["dspark"] = dataclasses.replace(config.dspark, experts=config.dspark.experts // ranks)
    if config.engram is not None:
        rows = tuple(count // ranks for count in config.engram.rows)
        changed["engram"] = dataclasses.replace(config.engram, rows=rows)
    return dataclasses.replace(config, **changed)


def random_table(config: V41Config) -> EngramTable | None:
    """Classes and hashes that reach all rows of the tables; which ones a text would reach makes no difference here."""
    engram = config.engram
    if engram is None:
        return None
    layers, sizes = len(engram.layers), engram.max_ngram - 1
    primes = torch.tensor(engram.rows)[:, None, None].expand(layers, sizes, engram.heads) // (sizes * engram.heads)
    flat = primes.flatten(1)
    return EngramTable(
        token_class=torch.randint(engram.token_classes, (config.vocab_size,)),
        pad_class=0,
        multipliers=torch.randint(1 << 40, (layers, engram.max_ngram)) * 2 + 1,
        primes=primes.contiguous(),
        offsets=flat.cumsum(1) - flat,
    )


def build(config: V41Config, provider: str, device: str) -> Network:
    """With finite random weights, laid out by the provider."""
    with torch.device(device):
        network = Network(config, select(device, provider), profile_named("model"), random_table(config))
    for name, value in network.named_parameters():
        if value.dtype == torch.uint8:
            value.random_(0, 256)
        elif value.dtype == torch.float8_e4m3fn:
            value.view(torch.uint8).random_(0, 256).bitwise_and_(0xB7)  # nothing above 1.75 * 2^-1
        elif value.dtype == torch.float8_e8m0fnu:
            value.view(torch.uint8).random_(119, 122)
        elif "norm" in name:
            value.fill_(1)
        else:
            value.normal_(std=0.02)
    network.prepare()
    return network


def batch(config: V41Config, pages: PagePool, rows: int, each: int, context: int) -> Rows:
    """``rows`` rows, ``each`` of a request that ends at ``context`` tokens."""
    device, requests = pages.pages.device, rows // each
    columns = -(-context // PAGE)
    table = 1 + torch.randperm(requests * columns, device=device).view(requests, columns)
    tokens = torch.randint(config.vocab_size, (rows,), device=device)
    return Rows.build(tokens, [context - each] * requests, [each] * requests, list(range(1, requests + 1)), table)


def floor_ms(network: Network, rows: Rows, each: int, context: int) -> float:
    """Of a verification: the products with weights, the caches that are read, part by part."""
    config, count, total = network.config, rows.count, 0.0
    modules: list[nn.Module] = [network.head]
    modules += [module for layer in network.layers for module in layer.modules()]
    for module in modules:
        if isinstance(module, Linear | JoinedLinear | GroupedLinear | Dense):
            values = prod(module.prepared.shape)
            total += floor_us(values * (2 if isinstance(module, Dense) else 1), 2 * values * count)
        elif isinstance(module, Experts):
            used = 1 - (1 - config.experts_per_token / module.slots) ** count
            bytes_ = used * module.slots * module.expert_bytes
            total += floor_us(bytes_, count * config.experts_per_token * 6 * config.hidden_size * config.expert_dim)
    for layer, ratio in enumerate(config.compress_ratios[: config.num_layers]):
        window = count / each * (config.window + each) * (config.head_dim + config.head_dim // 32)
        chosen = min(config.index_topk, context // ratio) * count * (config.head_dim * 9 // 16) if ratio else 0
        keys = config.window + (min(config.index_topk, context // ratio) if ratio else 0)
        total += floor_us(window + chosen, 4 * count * config.num_heads * config.head_dim * keys)
        if layer in config.index_sources:
            groups = context // ratio
            key_bytes = config.index_head_dim // 2 + config.index_head_dim // 32
            pairs = count * groups * config.index_heads * config.index_head_dim
            total += floor_us(count / each * groups * key_bytes, 2 * pairs)
    return total / 1e3


def median_ms(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) * 1e3


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", default="64,256")
    parser.add_argument("--context", default="4096,32768")
    parser.add_argument("--each", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    released = V41Config.from_dict(json.loads(args.config.read_text()))
    counts, contexts = sorted(map(int, args.rows.split(","))), sorted(map(int, args.context.split(",")))
    start = time.perf_counter()
    network = build(share(released, args.ranks), "cuda", "cuda")
    print(f"{machine()}\nbuilt in {time.perf_counter() - start:.0f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB")
    requests = counts[-1] // args.each
    layout = PageLayout.of(network.config, PAGE)
    pages = PagePool.allocate(layout, 1 + requests * -(-contexts[-1] // PAGE), "cuda")
    pages.pages.bitwise_and_(0x77)
    state = StatePool(StateLayout.of(network.config), requests + 1, "cuda")
    captures, found = Graphs(), []
    print(f"{'rows':>5} {'context':>8} {'ours':>8} {'drafting':>9} {'eager':>8} {'x':>6} {'floor':>8} {'x floor':>8}")
    for context in contexts:
        for count in counts:
            rows = batch(network.config, pages, count, args.each, context)
            step = StepGraphs(captures, network, pages, state, (count,), (rows.page_table.shape[1],))
            drafts = DraftGraphs(captures, network.dspark, pages, state, (count // args.each,))
            inputs = rows.token_ids[rows.last], rows.positions[rows.last] + 1, rows.slots
            eager = EagerDraft(network.dspark, pages, state)
            one = {
                "rows": count,
                "context": context,
                "ours_ms": median_ms(lambda: network.logits(step(rows)), 20),  # noqa: B023
                "drafting_ms": median_ms(lambda: drafts(*inputs), 20),  # noqa: B023
                "eager_ms": median_ms(lambda: network.logits(network(rows, pages, state)), 3),  # noqa: B023
                "eager_drafting_ms": median_ms(lambda: eager(*inputs), 3),  # noqa: B023
                "floor_ms": floor_ms(network, rows, args.each, context),
            }
            found.append(one)
            ours, slow = one["ours_ms"] + one["drafting_ms"], one["eager_ms"] + one["eager_drafting_ms"]
            print(
                f"{count:>5} {context:>8} {one['ours_ms']:>8.2f} {one['drafting_ms']:>9.2f} {slow:>8.2f} "
                f"{slow / ours:>6.2f} {one['floor_ms']:>8.2f} {one['ours_ms'] / one['floor_ms']:>8.2f}",
                flush=True,
            )
            if args.json:
                args.json.write_text(json.dumps({**machine(), "ranks": args.ranks, "steps": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
