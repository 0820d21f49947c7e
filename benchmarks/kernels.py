"""Our kernels on one NVIDIA GPU beside the best stock ones and the chip's limit, with the error printed.

    python benchmarks/kernels.py [--only indexer,experts] [--json FILE]

Microseconds are medians of CUDA-graph replays. The floor is the larger of the bytes that must move over 4.3 TB/s and
the operations over 790 TFLOP/s (bf16) or 1,500 (FP8), both measured on an H200. Errors are relative to the reference
provider on the same device and inputs, on some rows. A stock kernel that cannot be imported or run is named with the
reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import stock_kernels
import torch
from cuda_timing import floor_us, graph_us, machine, relative
from torch import Tensor

from deepinfer_plugin.kernels import Ops, select

PAGE = 128  # tokens of a page
TOPK = 512


def record(op: str, shape: str, library: str, us: float, bytes_: float, flops: float, error: float | None) -> dict:
    floor = floor_us(bytes_, flops)
    return {
        "op": op,
        "shape": shape,
        "library": library,
        "us": round(us, 2),
        "floor_us": round(floor, 2),
        "over_floor": round(us / floor, 2),
        "error": error,
    }


def indexer(cuda: Ops, reference: Ops) -> Iterator[dict]:
    """Decode: 4 rows a request at full context. Prefill: the last rows of one long request."""
    for requests, context in ((1, 4096), (16, 4096), (64, 4096), (16, 32768), (64, 32768), (16, 131072), (32, 131072)):
        yield from _scores(cuda, reference, "index_decode", requests, 4, context)
    for rows, context in ((8192, 8192), (4096, 16384), (2048, 32768)):
        yield from _scores(cuda, reference, "index_prefill", 1, rows, context)


def _scores(cuda: Ops, reference: Ops, op: str, requests: int, rows: int, context: int) -> Iterator[dict]:
    count, pages = requests * rows, context // PAGE
    pool = torch.randint(0, 256, (requests * pages, PAGE * 68), dtype=torch.uint8, device="cuda")
    key, scale = pool[:, : PAGE * 64].unflatten(1, (PAGE, 64)), pool[:, PAGE * 64 :].unflatten(1, (PAGE, 4))
    scale.random_(124, 130)
    owner = torch.arange(requests, device="cuda").repeat_interleave(rows)
    table = torch.randperm(requests * pages, device="cuda").view(requests, pages)
    visible = context - rows + 1 + torch.arange(rows, device="cuda").repeat(requests)
    query = torch.randn(count, 32, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(count, 32, device="cuda", dtype=torch.bfloat16) * 2**-6
    pairs = visible.sum().item()
    flops, bytes_ = pairs * 32 * 128 * 2, requests * context * 68 + count * context * 2
    shape = f"{count} rows x {context}"
    part = slice(0, min(count, 64))
    for low, name in ((True, "ours, model"), (False, "ours, deepinfer")):

        def ours(low: bool = low) -> Tensor:
            return cuda.index_scores(query, weight, key, scale, table, owner, visible, low)

        expected = reference.index_scores(query[part], weight[part], key, scale, table, owner[part], visible[part], low)
        error = relative(ours()[part], expected)
        yield record(op, shape, name, graph_us(ours), bytes_, flops, error)
    scores = cuda.index_scores(query, weight, key, scale, table, owner, visible, True)
    chosen = cuda.top_groups(scores, visible, TOPK, None)
    wrong = (chosen[part] != reference.top_groups(scores[part], visible[part], TOPK, None)).double().mean().item()
    us = graph_us(lambda: cuda.top_groups(scores, visible, TOPK, None))
    yield record(op.replace("index", "top512"), shape, "ours", us, pairs * 2, 0, wrong)
    for name, make in stock_kernels.INDEXER[op].items():
        yield _stock(
            op, shape, name, lambda make=make: make(query, weight, key, scale, table, owner, visible), bytes_, flops
        )


def _stock(
    op: str, shape: str, name: str, make: Callable[[], tuple[Callable, float | None]], bytes_: float, flops: float
) -> dict:
    try:
        call, error = make()
        return record(op, shape, name, graph_us(call), bytes_, flops, error)
    except Exception as reason:  # whatever a stock kernel fails with is what the reader wants to know
        return {"op": op, "shape": shape, "library": name, "failed": f"{type(reason).__name__}: {reason}"[:300]}


def experts(cuda: Ops, reference: Ops) -> Iterator[dict]:
    """One of eight ranks: 48 of 384 experts, the top 6 of T tokens of all ranks."""
    count, everywhere, hidden, inner, topk = 48, 384, 5120, 2304, 6
    byte = {"dtype": torch.uint8, "device": "cuda"}
    raw = (
        torch.randint(0, 256, (count, 2 * inner, hidden // 2), **byte),
        torch.randint(119, 122, (count, 2 * inner, hidden // 32), **byte).view(torch.float8_e8m0fnu),
        torch.randint(0, 256, (count, hidden, inner // 2), **byte),
        torch.randint(119, 122, (count, hidden, inner // 32), **byte).view(torch.float8_e8m0fnu),
    )
    classes = [("ours, exact", cuda), ("ours, fast", select("cuda", profile="deepinfer"))]
    prepared = {name: ops.prepare_experts(*raw) for name, ops in classes}
    theirs = reference.prepare_experts(*raw)
    calls = []
    for tokens in (8, 32, 64, 192, 576, 2048, 8192):
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
        routed = torch.rand(tokens, everywhere, device="cuda").topk(topk, -1).indices
        ids = torch.where(routed < count, routed, -1)
        weights = torch.rand(tokens, topk, device="cuda") + 0.2
        weights = weights / weights.sum(-1, keepdim=True) * 1.5
        pairs, active = int((ids >= 0).sum()), int(ids[ids >= 0].unique().numel())
        bytes_ = active * 3 * hidden * inner * (0.5 + 1 / 32) + pairs * hidden * 4
        calls.append(
            (f"T={tokens} rows={pairs} experts={active}", x, weights, routed, ids, bytes_, pairs * 6 * hidden * inner)
        )
    for shape, x, weights, _, ids, bytes_, flops in calls:
        part = slice(0, 32)
        expected = reference.moe_experts(x[part], weights[part], ids[part], theirs, 10.0)
        for name, ops in classes:
            call = partial(ops.moe_experts, x, weights, ids, prepared[name], 10.0)
            error = relative(call()[part], expected)
            yield record("experts", shape, name, graph_us(call), bytes_, flops, error)
    for name, make in stock_kernels.EXPERTS.items():
        for shape, x, weights, routed, _, bytes_, flops in reversed(calls):  # the largest is tuned for first
            yield _stock("experts", shape, name, lambda: make(x, weights, routed, raw), bytes_, flops)  # noqa: B023


SECTIONS: dict[str, Callable[[Ops, Ops], Iterator[dict]]] = {"indexer": indexer, "experts": experts}


HEAD = ("| op | shape | library | us | floor | x floor | error |", "| --- | --- | --- | --- | --- | --- | --- |")


def line(each: dict[str, Any]) -> str:
    place = f"| {each['op']} | {each['shape']} | {each['library']} |"
    if "failed" in each:
        return f"{place} did not run: {each['failed']} | | | |"
    error = "" if each["error"] is None else f"{each['error']:.1e}"
    return f"{place} {each['us']} | {each['floor_us']} | {each['over_floor']} | {error} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"sections, of {', '.join(SECTIONS)}")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - set(SECTIONS):
        parser.error(f"--only: no section {', '.join(sorted(unknown))}; legal: {', '.join(SECTIONS)}")
    torch.manual_seed(0)
    reference = select("cuda", "reference")
    cuda = select("cuda")
    print("\n".join(HEAD))
    records: list[dict[str, Any]] = []
    for name in args.only.split(","):
        for each in SECTIONS[name](cuda, reference):
            print(line(each), flush=True)
            records.append(each)
    if args.json:
        Path(args.json).write_text(json.dumps({"where": machine(), "records": records}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
