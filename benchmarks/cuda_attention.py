"""The cuda provider's attention and its writes to rings, tails and pages, at released shapes.

    python benchmarks/cuda_attention.py [--only sparse_attention,window_pack] [--rows 64,256,8192]

Up to 512 rows are verified rows, four a request with 16,384 groups behind it; more are one prefill. One line an op and
row count: microseconds of a call (median of CUDA-graph replays), GB/s of the bytes that a row must move, the floor
(those bytes over 4.3 TB/s or the operations over 790 TFLOP/s, whichever is longer), how far off it is, and the relative
error against the reference provider on the same inputs (attention: of the first rows; bytes: the share that differs).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from cuda_timing import graph_us, relative, sweep
from torch import Tensor

from deepinfer_plugin.kernels import Ops, select
from deepinfer_plugin.kernels.cuda import attention_cpp, memory
from deepinfer_plugin.kernels.reference import formats
from deepinfer_plugin.kernels.reference import memory as reference_memory

ROWS = (1, 16, 64, 128, 256, 512, 8192)
CHECKED = 32  # rows of attention compared with the reference
COPIES = 4  # of the arguments, rotated
HEADS, D, INDEX_D, CHOSEN, WINDOW, RING = 64, 512, 128, 512, 128, 134
GROUPS, CONTEXT = 64, 16384  # groups of a page, of a request
LATENT_BYTES = D // 2 + D // 16
WINDOW_BYTES = D + D // 32


@dataclass
class Call:
    args: dict[str, Any]
    bytes: float  # that must move
    flops: float = 0.0
    written: tuple[str, ...] = ()
    rows: tuple[str, ...] = field(default=())  # arguments cut to CHECKED rows for the reference


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def ints(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, device="cuda")


def spans(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Request, position and number of earlier rows in the batch, of every row."""
    per_request = 4 if rows <= 512 else rows
    row = torch.arange(rows, device="cuda")
    return row // per_request, 2 * CONTEXT - per_request + row % per_request, row % per_request


def packed(rows: int) -> Tensor:
    return reference_memory.window_pack(normal(rows, D))


def sections(pages: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Latents, their scales, index keys and their scales of a page pool, as views strided by the page."""
    widths = (D // 2, D // 16, INDEX_D // 2, INDEX_D // 32)
    pool = torch.zeros(pages, GROUPS * sum(widths), dtype=torch.uint8, device="cuda")
    views, offset = [], 0
    for width in widths:
        views.append(pool[:, offset : offset + GROUPS * width].unflatten(1, (GROUPS, width)))
        offset += GROUPS * width
    for first in range(0, pages, 256):
        part = normal(min(256, pages - first), GROUPS, D)
        values, scales = formats.latent_cast(part)
        views[0][first : first + 256], views[1][first : first + 256] = values, scales.view(torch.uint8)
    return views[0], views[1], views[2], views[3]


def sparse_attention(rows: int) -> Iterator[tuple[str, Call]]:
    request, positions, fresh = spans(rows)
    requests = int(request[-1]) + 1
    pages = requests * CONTEXT // GROUPS
    latent, latent_scale, *_ = sections(pages)
    selected = torch.rand(rows, CONTEXT, device="cuda").topk(CHOSEN).indices.sort().values
    args = {
        "q": normal(rows, HEADS, D) * 2,
        "window": packed(rows),
        "positions": positions,
        "fresh": fresh,
        "row_slots": request + 1,
        "window_floor": torch.zeros_like(positions),
        "ring": packed((requests + 1) * RING).view(requests + 1, RING, -1),
        "window_len": WINDOW,
        "latent": latent,
        "latent_scale": latent_scale,
        "page_table": torch.randperm(pages, device="cuda").view(requests, -1),
        "requests": request,
        "selected": selected,
        "sink": normal(HEADS, dtype=torch.float32),
        "scale": D**-0.5,
        "block_future": None,
    }
    by_row = ("q", "window", "positions", "fresh", "row_slots", "window_floor", "requests", "selected")
    for name, chosen in (("compressed", CHOSEN), ("window", 0)):
        keys = WINDOW * WINDOW_BYTES / (1 if rows <= 512 else WINDOW) + chosen * LATENT_BYTES
        moved = rows * (2 * HEADS * D * 2 + keys)
        if not chosen:
            args |= dict.fromkeys(("latent", "latent_scale", "page_table", "requests", "selected"))
        yield name, Call(dict(args), moved, 4.0 * rows * HEADS * D * (WINDOW + chosen), rows=by_row)


def window_pack(rows: int) -> Iterator[tuple[str, Call]]:
    yield "", Call({"kv": normal(rows, D)}, rows * (2 * D + WINDOW_BYTES))


def kept(rows: int) -> dict[str, Tensor]:
    """Ids of a write: distinct slots, all rows kept."""
    return {
        "row_slots": torch.randperm(rows + 1, device="cuda")[:rows],
        "positions": ints(0, 1 << 20, rows),
        "keep": torch.ones(rows, dtype=torch.bool, device="cuda"),
    }


def window_write(rows: int) -> Iterator[tuple[str, Call]]:
    ring = torch.zeros(rows + 1, RING, WINDOW_BYTES, dtype=torch.uint8, device="cuda")
    tags = torch.zeros(rows + 1, RING, dtype=torch.int32, device="cuda")
    args = {"packed": packed(rows), **kept(rows), "ring": ring, "tags": tags}
    yield "", Call(args, rows * (2 * WINDOW_BYTES + 4), written=("ring", "tags"))


def compress_pair(rows: int) -> Iterator[tuple[str, Call]]:
    request, positions, fresh = spans(rows)
    args = {
        "value": normal(rows, D, dtype=torch.float32),
        "score": normal(rows, D, dtype=torch.float32),
        "positions": positions,
        "fresh": fresh,
        "row_slots": request,
        "tail": normal(int(request[-1]) + 1, 7, 2, D, dtype=torch.float32),
        "dtype": torch.bfloat16,
    }
    yield "", Call(args, rows * D * (2 * 4 + 2))


def tail_write(rows: int) -> Iterator[tuple[str, Call]]:
    tail = torch.zeros(rows + 1, 7, 2, D, device="cuda")
    value, score = normal(rows, D, dtype=torch.float32), normal(rows, D, dtype=torch.float32)
    yield "", Call({"value": value, "score": score, **kept(rows), "tail": tail}, rows * D * 16, written=("tail",))


def page_write(op: str, rows: int) -> Iterator[tuple[str, Call]]:
    """Every second row completes a group, as with ratio 2."""
    latent, latent_scale, key, key_scale = sections(rows)
    size, values, scales = (D, latent, latent_scale) if op == "latent_write" else (INDEX_D, key, key_scale)
    args = {
        op.removesuffix("_write").removeprefix("index_"): normal(rows, size),
        "values": values,
        "scales": scales,
        "page_ids": torch.randperm(rows, device="cuda"),
        "groups": ints(0, GROUPS, rows),
        "keep": torch.arange(rows, device="cuda") % 2 == 0,
    }
    moved = -(-rows // 2) * (2 * size + values.shape[2] + scales.shape[2])
    yield "", Call(args, moved, written=("values", "scales"))


def latent_write(rows: int) -> Iterator[tuple[str, Call]]:
    yield from page_write("latent_write", rows)


def index_key_write(rows: int) -> Iterator[tuple[str, Call]]:
    yield from page_write("index_key_write", rows)


def ngram_write(rows: int) -> Iterator[tuple[str, Call]]:
    ngrams = torch.zeros(rows + 1, 9, dtype=torch.int64, device="cuda")
    yield (
        "",
        Call({"token_classes": ints(0, 99092, rows), **kept(rows), "ngrams": ngrams}, rows * 33, written=("ngrams",)),
    )


BENCHMARKS: dict[str, Callable[[int], Iterator[tuple[str, Call]]]] = {
    build.__name__: build
    for build in (
        sparse_attention,
        window_pack,
        window_write,
        compress_pair,
        tail_write,
        latent_write,
        index_key_write,
        ngram_write,
    )
}


def copy(args: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in args.items()}


def error(op: str, call: Call, reference: Ops) -> float:
    """Relative error of the result on the first rows, or the share of written numbers that differ."""
    run = getattr(memory, op, None) or getattr(attention_cpp, op)
    if call.written:
        got, want = copy(call.args), copy(call.args)
        run(**got)
        getattr(reference, op)(**want)
        return max((got[name] != want[name]).double().mean().item() for name in call.written)
    cut = {
        name: value[:CHECKED] if name in call.rows and value is not None else value for name, value in call.args.items()
    }
    got, want = run(**call.args), getattr(reference, op)(**cut)
    got = got[: want.shape[0]]
    if not want.is_floating_point():
        return (got != want).double().mean().item()
    return relative(got, want)


def measure(op: str, rows: int, named: tuple[str, Call]) -> tuple[str, float, float, float, float]:
    name, call = named
    run = getattr(memory, op, None) or getattr(attention_cpp, op)
    off = error(op, call, select("cuda", "reference"))
    # Page pools are large and shared: only the rest is rotated.
    pools = {key: value for key, value in call.args.items() if key in ("latent", "latent_scale")}
    variants = [({**copy({k: v for k, v in call.args.items() if k not in pools}), **pools},) for _ in range(COPIES)]
    return name, graph_us(lambda args: run(**args), variants), call.bytes, call.flops, off


if __name__ == "__main__":
    sys.exit(sweep(__doc__, BENCHMARKS, ROWS, measure))
