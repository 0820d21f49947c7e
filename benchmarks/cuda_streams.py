"""The cuda provider's dense ops at released shapes: products, norms, streams, gate, slots, Engram and draft heads.

    python benchmarks/cuda_streams.py [--only linear,hc_mix] [--rows 64,256,8192]

One line an op, shape and row count: microseconds of a call (median of CUDA-graph replays), GB/s of the bytes that must
move, the floor (those bytes over 4.3 TB/s or the operations over 790 TFLOP/s, whichever is longer), how far off it is,
and the error against the reference provider on the first rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cuda_timing import graph_us, relative, sweep
from torch import Tensor

from deepinfer_plugin.eplb.policy import place
from deepinfer_plugin.kernels import Ops, select
from deepinfer_plugin.kernels.reference import formats
from deepinfer_plugin.model.expert_map import ExpertMap, split_rounds

ROWS = (1, 16, 64, 128, 256, 512, 8192)
CHECKED = 64  # rows compared with the reference
VARIANT_BYTES = 1 << 30  # of all copies of the arguments together
HIDDEN, STREAMS = 5120, 4


@dataclass
class Weights:
    """A weight that each provider prepares for itself."""

    prepare: str
    args: tuple[Any, ...]


@dataclass
class Call:
    shape: str
    args: dict[str, Any]
    flops: float = 0.0
    bytes: float | None = None  # None: all of the arguments and the results


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def fp8_weight(n: int, k: int) -> tuple[Tensor, Tensor]:
    return formats.fp8_weight_cast(normal(n, k, dtype=torch.float32) * k**-0.5)


def linear(rows: int) -> Iterator[Call]:
    for name, n, k in (
        ("wq_a + wkv", 1792, HIDDEN),
        ("wq_b", 32768, 1280),
        ("wo_b", HIDDEN, 8192),
        ("shared w1 + w3", 4608, HIDDEN),
        ("shared w2", HIDDEN, 2304),
        ("index wq_b", 4096, 1280),
        ("engram wkv", 25600, 6144),
    ):
        args = {"x": normal(rows, k), "weight": Weights("prepare_linear", fp8_weight(n, k))}
        yield Call(f"{name} {n}x{k}", args, 2.0 * rows * n * k)


def dense(rows: int) -> Iterator[Call]:
    for name, n, k in (("compressor", 512, HIDDEN), ("index weights", 32, HIDDEN), ("head / 8", 16160, HIDDEN)):
        weight = Weights("prepare_dense", (normal(n, k),))
        args = {"x": normal(rows, k), "weight": weight, "out_dtype": torch.float32}
        yield Call(f"{name} {n}x{k}", args, 2.0 * rows * n * k)


def grouped_linear(rows: int) -> Iterator[Call]:
    weight = Weights("prepare_grouped", (*fp8_weight(8192, 4096), 8))
    for fp8 in (False, True):
        args = {"o": normal(rows, 8, 4096), "weight": weight, "fp8": fp8}
        yield Call(f"wo_a 8x1024x4096 fp8={fp8}", args, 2.0 * rows * 8192 * 4096)


def rms_norm(rows: int) -> Iterator[Call]:
    for size in (HIDDEN, 1280, 512, 128):
        yield Call(f"{size}", {"x": normal(rows, size), "weight": normal(size), "eps": 1e-20})


def rope(rows: int) -> Iterator[Call]:
    inv_freq = torch.logspace(0, -4, 32, device="cuda")
    positions = torch.randint(0, 1 << 20, (rows,), device="cuda")
    for shape in ((64, 512), (512,), (32, 128)):
        args = {"x": normal(rows, *shape), "positions": positions, "inv_freq": inv_freq, "inverse": False}
        turned = args["x"][..., -2 * inv_freq.shape[0] :].numel()
        yield Call("x".join(map(str, shape)), args, bytes=2 * turned * args["x"].element_size())


def hc_mix(rows: int) -> Iterator[Call]:
    k, mixes = STREAMS * HIDDEN, (2 + STREAMS) * STREAMS
    args = {
        "streams": normal(rows, STREAMS, HIDDEN),
        "fn": normal(mixes, k, dtype=torch.float32) * k**-0.5,
        "base": normal(mixes, dtype=torch.float32),
        "scale": torch.ones(3, device="cuda"),
        "norm_eps": 1e-20,
        "hc_eps": 1e-6,
        "iters": 20,
    }
    yield Call(f"{STREAMS}x{HIDDEN}", args, 3 * 2.0 * rows * mixes * k)


def hc_collapse(rows: int) -> Iterator[Call]:
    pre = torch.rand(rows, STREAMS, device="cuda")
    yield Call(f"{STREAMS}x{HIDDEN}", {"streams": normal(rows, STREAMS, HIDDEN), "pre": pre})


def hc_expand(rows: int) -> Iterator[Call]:
    args = {
        "out": normal(rows, HIDDEN),
        "streams": normal(rows, STREAMS, HIDDEN),
        "post": torch.rand(rows, STREAMS, device="cuda"),
        "comb": torch.rand(rows, STREAMS, STREAMS, device="cuda"),
    }
    yield Call(f"{STREAMS}x{HIDDEN}", args)


def hc_site(rows: int) -> Iterator[Call]:
    mix, late = next(hc_mix(rows)), next(hc_expand(rows)).args
    before = {"pre": torch.rand(rows, STREAMS, device="cuda"), "weight": normal(HIDDEN)}
    yield Call(mix.shape, mix.args | late | before, mix.flops)


def moe_gate(rows: int) -> Iterator[Call]:
    experts = 384
    args = {
        "x": normal(rows, HIDDEN),
        "weight": Weights("prepare_dense", (normal(experts, HIDDEN) * HIDDEN**-0.5,)),
        "bias": normal(experts, dtype=torch.float32),
        "bias_vl": None,
        "image_mask": None,
        "topk": 6,
        "scale": 1.5,
    }
    yield Call(f"{experts}x{HIDDEN} top 6", args, 2.0 * rows * experts * HIDDEN)


def swiglu(rows: int) -> Iterator[Call]:
    yield Call("2304", {"gate": normal(rows, 2304), "up": normal(rows, 2304), "limit": 10.0, "weight": None})


def engram_hash(rows: int) -> Iterator[Call]:
    new = lambda low, high, *shape: torch.randint(low, high, shape, device="cuda")  # noqa: E731
    args = {
        "token_classes": new(-1, 99092, rows),
        "positions": new(0, 1 << 20, rows),
        "fresh": torch.zeros(rows, dtype=torch.int64, device="cuda"),
        "row_slots": new(0, 300, rows),
        "ngrams": new(-1, 99092, 300, 9),  # no size but the row count may equal the row count
        "multipliers": new(0, 1 << 45, 4) * 2 + 1,
        "primes": new(15999990, 16001000, 3, 8),
        "offsets": torch.arange(24, device="cuda") * 16001000,
        "pad_class": 7,
    }
    yield Call("24 columns", args)


def engram_gather(rows: int) -> Iterator[Call]:
    size = 4_000_000
    args = {
        "rows": torch.randint(0, size, (rows, 24), device="cuda"),
        "table": torch.randint(0, 120, (size, 256), dtype=torch.uint8, device="cuda").view(formats.E4M3),
        "scale": torch.randint(120, 130, (size, 8), dtype=torch.uint8, device="cuda").view(formats.E8M0),
        "dtype": torch.bfloat16,
    }
    yield Call("24x256", args, bytes=rows * 24 * (8 + 264 + 512))


def engram_gate(rows: int) -> Iterator[Call]:
    args = {
        "streams": normal(rows, STREAMS, HIDDEN),
        "kv": normal(rows, (STREAMS + 1) * HIDDEN),
        "q_weight": normal(STREAMS, HIDDEN),
        "k_weight": normal(STREAMS, HIDDEN),
        "eps": 1e-20,
        "live": torch.ones(rows, dtype=torch.bool, device="cuda"),
    }
    yield Call(f"{STREAMS}x{HIDDEN}", args)


def assign_slots(rows: int) -> Iterator[Call]:
    """Rows of all ranks; popularity n^-0.5, as the policy places it. The floor is a reading and a writing of pairs."""
    experts, topk = 384, 6
    wanted = (torch.arange(experts, device="cuda") + 1.0).log() * 0.5
    noise = torch.rand(rows, experts, device="cuda").log().neg().log()
    for ranks, spare in ((8, 32), (64, 64)):
        counts = 1e4 * (np.arange(experts) + 1.0) ** -0.5
        places = ExpertMap(place(counts[None, None], experts + spare, ranks), experts, ranks)
        args = {
            "ids": (noise + wanted).topk(topk, largest=False).indices,
            "home": places.home[0, :-1].cuda(),
            "shared": places.shared[0].cuda(),
            "slots": places.replicas[0].cuda(),
            "per_rank": places.slots,
            "rounds": split_rounds(select("cuda")),
        }
        yield Call(f"{experts}+{spare}, {ranks} ranks", args)


def markov(rows: int) -> Iterator[Call]:
    if rows > 512:
        return
    vocab, rank = 129280, 256
    args = {
        "prev": torch.randint(0, vocab, (rows,), device="cuda"),
        "embed": normal(vocab, rank),
        "head": Weights("prepare_dense", (normal(vocab, rank),)),
    }
    yield Call(f"{vocab}x{rank}", args, 2.0 * rows * vocab * rank, vocab * rank * 2 + rows * (vocab * 4 + rank * 4))


def confidence(rows: int) -> Iterator[Call]:
    yield Call(f"{HIDDEN}", {"hidden": normal(rows, HIDDEN), "e": normal(rows, 256), "proj": normal(1, HIDDEN + 256)})


BENCHMARKS: dict[str, Callable[[int], Iterator[Call]]] = {
    build.__name__: build
    for build in (
        rms_norm,
        rope,
        hc_mix,
        hc_collapse,
        hc_expand,
        hc_site,
        moe_gate,
        assign_slots,
        swiglu,
        markov,
        confidence,
        engram_hash,
        engram_gather,
        engram_gate,
        linear,
        dense,
        grouped_linear,
    )
}


def size(value: Any) -> int:
    if isinstance(value, Weights):
        return size(value.args)
    if isinstance(value, tuple):
        return sum(map(size, value))
    return value.nbytes if isinstance(value, Tensor) else 0


def copy(value: Any) -> Any:
    if isinstance(value, Weights):
        return Weights(value.prepare, tuple(map(copy, value.args)))
    return value.clone() if isinstance(value, Tensor) else value


def prepared(ops: Ops, args: dict[str, Any], rows: int | None = None) -> dict[str, Any]:
    """Arguments of a call: weights as ``ops`` wants them, and of ``rows`` row arguments the first few."""
    out = {}
    for name, value in args.items():
        if isinstance(value, Weights):
            value = getattr(ops, value.prepare)(*value.args)
        elif rows is not None and rows > CHECKED and isinstance(value, Tensor) and value.shape[0] == rows:
            value = value[:CHECKED]
        out[name] = value
    return out


def results(ops: Ops, op: str, args: dict[str, Any]) -> tuple[Tensor, ...]:
    got = getattr(ops, op)(**args)
    return got if isinstance(got, tuple) else (got,)


def error(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Largest relative error of the results; of ids, the share that differs."""
    worst = 0.0
    for got, want in zip(actual, expected, strict=True):
        floats = want.is_floating_point()
        worst = max(worst, relative(got, want) if floats else (got != want).double().mean().item())
    return worst


def measure(op: str, rows: int, call: Call) -> tuple[str, float, float, float, float]:
    ours, reference = select("cuda"), select("cuda", "reference")
    first = prepared(ours, {name: copy(value) for name, value in call.args.items()})  # rope takes its argument
    got = results(ours, op, first)
    moved = call.bytes if call.bytes is not None else size(tuple(call.args.values())) + size(got)
    some = None if op == "assign_slots" else rows  # where a row goes depends on all
    expected = results(reference, op, prepared(reference, call.args, some))
    off = error(tuple(part[: len(want)] for part, want in zip(got, expected, strict=True)), expected)
    copies = max(1, min(8, VARIANT_BYTES // max(1, size(tuple(call.args.values())))))
    variants = [first] + [prepared(ours, {k: copy(v) for k, v in call.args.items()}) for _ in range(copies - 1)]
    us = graph_us(lambda args: getattr(ours, op)(**args), [(args,) for args in variants])
    return call.shape, us, moved, call.flops, off


if __name__ == "__main__":
    sys.exit(sweep(__doc__, BENCHMARKS, ROWS, measure))
