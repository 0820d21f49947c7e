"""A whole step of one rank on one NVIDIA GPU: random weights of the real shapes, no exchange between ranks.

    python benchmarks/step.py CONFIG [--rows 64,256,512] [--context 4096,32768,131072] [--prefill 8192] [--json FILE]

CONFIG is the config.json of a checkpoint. ``--ranks``: expert-parallel ranks, of which this one holds its share of the
experts (a row chooses as many of them as its choices and those of the other ranks' rows would send here) and of the
Engram tables. ``--each``: rows of a request, its newest token and the drafts that are verified with it. ``--prefill``:
rows of a chunk that ends at the context, where that is long enough. ``--profile``: the rounding profile, which also
chooses the class of the experts. ``--stock-layers``: layers whose weights the stock step rotates through, 0: none of
it.

Milliseconds are medians of replays of one graph of the whole step with its logits, page tables as wide as the context;
drafting, which only ours does, comes apart. Parts are timed inside a graph that also has events. The baseline is the
same step of stock kernels (``stock_step.py``) in the same run. The floor is what the weights and the caches must move
over 4.3 TB/s, or what the products need at 790 TFLOP/s (bf16) where that is more, both measured on an H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
from cuda_timing import Parts, captured, floor_us, machine, replay_ms
from torch import Tensor

from deepinfer_plugin.kernels import Ops, select
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.engram_table import EngramTable
from deepinfer_plugin.model.layers import Dense, GroupedLinear, JoinedLinear, Linear
from deepinfer_plugin.model.memory import PageLayout, PagePool, StateLayout, StatePool
from deepinfer_plugin.model.moe import Experts
from deepinfer_plugin.model.network import Network
from deepinfer_plugin.model.profiles import PROFILES, profile_named
from deepinfer_plugin.model.rows import Rows

PAGE = 128
POOL = 1 << 22  # tokens in pages: requests beyond that share them
PARTS = ("experts", "dense", "attention", "indexer", "mHC", "rest")
PART_OF = {
    **dict.fromkeys(("moe_experts",), "experts"),
    **dict.fromkeys(("linear", "grouped_linear", "dense", "swiglu"), "dense"),
    **dict.fromkeys(("sparse_attention", "rope", "window_pack", "window_write"), "attention"),
    **dict.fromkeys(("compress_pair", "tail_write", "latent_write"), "attention"),
    **dict.fromkeys(("index_scores", "candidate_blocks", "top_groups", "index_key_write"), "indexer"),
    **dict.fromkeys(("hc_site", "hc_mix", "hc_collapse", "hc_expand", "rms_norm"), "mHC"),
}


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


def in_parts(ops: Ops, parts: Parts) -> Ops:
    """The same ops, each of which says which part of the step it belongs to."""

    def named(op: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            parts.next(PART_OF.get(op, "rest"))
            return run(*args)

        return call

    ops._run = {op: named(op, run) for op, run in ops._run.items()}
    return ops


def build(config: V41Config, ops: Ops, device: str, profile: str = "model") -> Network:
    """With finite random weights, as they are loaded: not laid out yet."""
    with torch.device(device):
        network = Network(config, ops, profile_named(profile), random_table(config))
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
    return network


def batch(config: V41Config, pages: PagePool, rows: int, each: int, context: int) -> Rows:
    """``rows`` rows, ``each`` of a request that ends at ``context`` tokens."""
    device, requests = pages.pages.device, rows // each
    columns = -(-context // PAGE)
    table = torch.randperm(requests * columns, device=device).view(requests, columns) % (len(pages.pages) - 1) + 1
    tokens = torch.randint(config.vocab_size, (rows,), device=device)
    return Rows.build(tokens, [context - each] * requests, [each] * requests, list(range(1, requests + 1)), table)


def floor_ms(network: Network, rows: Rows, each: int, context: int) -> dict[str, float]:
    """Of each part: the products with weights, the caches that are read."""
    config, count, total = network.config, rows.count, dict.fromkeys(PARTS, 0.0)
    for module in (module for layer in network.layers for module in layer.modules()):
        if isinstance(module, Linear | JoinedLinear | GroupedLinear | Dense):
            values = prod(module.prepared.shape)
            total["dense"] += floor_us(values * (2 if isinstance(module, Dense) else 1), 2 * values * count)
        elif isinstance(module, Experts):
            used = 1 - (1 - config.experts_per_token / module.slots) ** count
            bytes_ = used * module.slots * module.expert_bytes
            flops = count * config.experts_per_token * 6 * config.hidden_size * config.expert_dim
            total["experts"] += floor_us(bytes_, flops)
    for layer, ratio in enumerate(config.compress_ratios[: config.num_layers]):
        window = count / each * (config.window + each) * (config.head_dim + config.head_dim // 32)
        visible = (rows.positions + 1) // ratio if ratio else torch.zeros_like(rows.positions)
        chosen = visible.clamp(max=config.index_topk).sum().item()
        flops = 4 * config.num_heads * config.head_dim * (count * config.window + chosen)
        total["attention"] += floor_us(window + chosen * (config.head_dim * 9 // 16), flops)
        if layer in config.index_sources:
            key_bytes = count / each * (context // ratio) * (config.index_head_dim // 2 + config.index_head_dim // 32)
            pairs = visible.sum().item() * config.index_heads * config.index_head_dim
            total["indexer"] += floor_us(key_bytes, 2 * pairs)
    stream_bytes = count * config.hc_mult * config.hidden_size * 2
    total["mHC"] = 2 * config.num_layers * floor_us(2.5 * stream_bytes, 0)  # read, written; in and out
    logits = 1 if each == count else count
    values = prod(network.head.prepared.shape)
    total["rest"] = floor_us(2 * values, 2 * values * logits)
    return {part: us / 1e3 for part, us in total.items()}


def measured(work: Callable[[], Tensor], parts: Parts, replays: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of the graph of ``work`` and of its parts.

    Raises:
        ValueError: its logits are not finite. NaN chooses the same few experts for all rows: that is another work.
    """
    if not work().isfinite().all():
        raise ValueError("logits are not finite")
    total = replay_ms(captured(work), replays)
    split = parts.measure(work, replays)
    gc.collect()
    torch.cuda.empty_cache()  # of the graphs: others follow
    return total, split


class Stock:
    """The same steps of stock kernels; why they do not run, if they do not."""

    def __init__(self, network: Network, layers: int, counts: list[int], parts: Parts):
        self.parts, self.failed = parts, "" if layers else "not asked for"
        if self.failed:
            return
        try:
            import stock_step

            self.step, self.weights = stock_step.StockStep, stock_step.StockWeights(network, layers, counts)
        except Exception as reason:  # whatever a stock kernel fails with is what the reader wants to know
            self.fail(reason)

    def fail(self, reason: Exception) -> None:
        traceback.print_exc()
        self.failed = f"{type(reason).__name__}: {reason}"[:300]

    def measure(self, rows: Rows, each: int, context: int, replays: int) -> dict[str, Any]:
        one: dict[str, Any] = {}
        for name, fp8 in (("stock_default", False), ("stock_best", True)):
            if self.failed:
                return {**one, "stock_failed": self.failed}
            try:
                step = self.step(self.weights, rows, each, context, self.parts, fp8)
                one[f"{name}_ms"], one[f"{name}_parts"] = measured(step, self.parts, replays)
            except Exception as reason:
                self.fail(reason)
        return one


HEAD = "| rows | context | ours ms | drafting | stock, default | stock, best | best / ours | floor | ours / floor |"


def line(one: dict[str, Any]) -> str:
    default, best = (f"{one[name]:.2f}" if name in one else "" for name in ("stock_default_ms", "stock_best_ms"))
    drafting = f"{one['drafting_ms']:.2f}" if "drafting_ms" in one else ""
    over = f"{one['stock_best_ms'] / one['ours_ms']:.2f}" if "stock_best_ms" in one else ""
    return (
        f"| {one['rows']} | {one['context']} | {one['ours_ms']:.2f} | {drafting} | {default} | {best} | {over} "
        f"| {one['floor_ms']:.2f} | {one['ours_ms'] / one['floor_ms']:.2f} |"
    )


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--profile", choices=PROFILES, default="model")
    parser.add_argument("--rows", default="64,256,512")
    parser.add_argument("--context", default="4096,32768,131072")
    parser.add_argument("--prefill", type=int, default=8192)
    parser.add_argument("--each", type=int, default=4)
    parser.add_argument("--stock-layers", type=int, default=3, help="whose weights the stock step rotates through")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    released = V41Config.from_dict(json.loads(args.config.read_text()))
    counts, contexts = ([int(number) for number in given.split(",")] for given in (args.rows, args.context))
    parts, start = Parts(), time.perf_counter()
    ops = in_parts(select("cuda", profile=args.profile), parts)
    network = build(share(released, args.ranks), ops, "cuda", args.profile)
    print(f"{machine()}\nbuilt in {time.perf_counter() - start:.0f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB")
    points = [(count, args.each, context) for count in counts for context in contexts]
    points += [(args.prefill, args.prefill, context) for context in contexts if 0 < args.prefill <= context]
    tokens = max(count // each * context for count, each, context in points)
    pages = PagePool.allocate(PageLayout.of(network.config, PAGE), 1 + -(-min(tokens, POOL) // PAGE), "cuda")
    pages.pages.random_(0, 256).bitwise_and_(0x77)
    state = StatePool(StateLayout.of(network.config), max(counts) // args.each + 1, "cuda")
    sizes = sorted({count for count, _, _ in points})
    stock = Stock(network, args.stock_layers, sizes, parts)
    loaded = torch.cuda.memory_allocated()
    network.prepare()  # not before: it drops what was loaded
    now = torch.cuda.memory_allocated()
    print(f"{now / 2**30:.1f} GiB with pages, state and stock; laying out added {(now - loaded) / 2**30:.2f}")
    found = []
    print(f"{HEAD}\n{'| --- ' * 9}|", flush=True)
    for count, each, context in points:
        rows = batch(network.config, pages, count, each, context)
        prefill, replays = each == count, 10 if each < count else 3

        def step(rows: Rows = rows, prefill: bool = prefill) -> Tensor:
            # What a Rows derives from its fields is computed by the graph, as in a server: a new one every time.
            hidden = network(dataclasses.replace(rows), pages, state)
            with parts.whole("rest"):
                return network.logits(hidden[-1:] if prefill else hidden)

        ours, ours_parts = measured(step, parts, replays)
        print(f"ours, {count} rows at {context}: {ours:.2f} ms", file=sys.stderr)  # the stock step may yet end the run
        floor = floor_ms(network, rows, each, context)
        one = {"rows": count, "context": context, "prefill": prefill, "ours_ms": ours, "floor_ms": sum(floor.values())}
        one |= {"ours_parts": ours_parts, "floor_parts": floor}
        if network.dspark is not None and not prefill:
            inputs = rows.token_ids[rows.last], rows.positions[rows.last] + 1, rows.slots
            draft = lambda: network.dspark.draft(*inputs, state, pages, None)  # noqa: B023, E731
            draft()
            one["drafting_ms"] = replay_ms(captured(draft), replays)
        one |= stock.measure(rows, each, context, replays)
        found.append(one)
        print(line(one), flush=True)
        for name in ("ours", "stock_default", "stock_best", "floor"):
            split = one.get(f"{name}_parts", {})
            print(f"  {name:14}" + "".join(f" {part} {split.get(part, 0):.2f}" for part in PARTS), flush=True)
        if args.json:
            options = {"ranks": args.ranks, "each": args.each, "profile": args.profile}
            args.json.write_text(json.dumps({**machine(), **options, "steps": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
