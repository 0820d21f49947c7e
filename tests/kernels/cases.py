"""One valid, random call per op: the material of the contract, error and batch-invariance tests.

A case knows which arguments have a row per token, so a test can run any subset of rows, and which are written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer_plugin.kernels import Ops
from deepinfer_plugin.kernels.reference import formats


@dataclass
class Weights:
    """A prepared weight, made by the op table under test."""

    prepare: str
    args: tuple[Any, ...]


@dataclass
class Case:
    op: str
    args: dict[str, Any]
    rows: tuple[str, ...]  # arguments indexed by row
    written: tuple[str, ...] = ()  # arguments the op writes
    given_up: tuple[str, ...] = ()  # arguments whose memory may become the result's
    # Largest error another provider may have against the reference, in units of the result's own rounding (bf16 2^-8,
    # float32 2^-23) times the largest value of a row. 0: bytes, ids and copies must be equal.
    ulps: float = 2.0
    together: bool = False  # rows are one question: a row's result depends on the others, further results are of no row

    def run(self, ops: Ops, rows: Tensor | Sequence[int] | None = None) -> tuple[Tensor, ...]:
        """Call the op on some rows (all by default): its results, then the arguments it wrote."""
        args = dict(self.args)
        for name in self.written + self.given_up:
            args[name] = args[name].clone() if isinstance(args[name], Tensor) else args[name]
        for name, value in args.items():
            if isinstance(value, Weights):
                args[name] = getattr(ops, value.prepare)(*value.args)
            elif rows is not None and name in self.rows and value is not None:
                args[name] = value[torch.as_tensor(rows, dtype=torch.int64)]
        result = getattr(ops, self.op)(**args)
        results = () if result is None else result if isinstance(result, tuple) else (result,)
        return (*results, *(args[name] for name in self.written))

    @property
    def count(self) -> int:
        return self.args[self.rows[0]].shape[0]


class Random:
    """Seeded tensors."""

    def __init__(self, seed: int, dtype: torch.dtype):
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def normal(self, *shape: int, dtype: torch.dtype | None = None, spread: float = 0.0) -> Tensor:
        """``spread``: standard deviation of a log2 scale per row, so rows and blocks differ in magnitude."""
        x = torch.randn(*shape, generator=self.generator)
        if spread:
            x = x * torch.exp2(torch.randn(*shape[:-1], 1, generator=self.generator) * spread)
        return x.to(dtype or self.dtype)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def mask(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator) < 0.7

    def distinct(self, rows: int, high: int) -> Tensor:
        return torch.randperm(high, generator=self.generator)[:rows]

    def fp8_weight(self, n: int, k: int) -> tuple[Tensor, Tensor]:
        return formats.fp8_weight_cast(self.normal(n, k, dtype=torch.float32, spread=1.0) * k**-0.5)

    def mxfp4(self, *shape: int) -> tuple[Tensor, Tensor]:
        return formats.mxfp4_cast(self.normal(*shape, dtype=torch.float32, spread=1.0) * shape[-1] ** -0.5)

    def window(self, *shape: int) -> Tensor:
        """Packed window rows [..., D + D/32]."""
        values, scale = formats.fp8_cast(self.normal(*shape, dtype=torch.float32))
        return torch.cat((values.view(torch.uint8), scale.view(torch.uint8)), -1)

    def latents(self, *shape: int) -> tuple[Tensor, Tensor]:
        packed, scale = formats.latent_cast(self.normal(*shape, dtype=torch.float32))
        return packed, scale.view(torch.uint8)

    def keys(self, *shape: int) -> tuple[Tensor, Tensor]:
        packed, scale = formats.index_cast(self.normal(*shape, dtype=torch.float32))
        return packed, scale.view(torch.uint8)


H, D, HEADS, DI, HI, E, I = 192, 64, 4, 32, 8, 6, 64  # noqa: E741


def linear(r: Random, t: int, scale: int) -> Case:
    k = H * scale
    weight = Weights("prepare_linear", r.fp8_weight(80, k))
    return Case("linear", {"x": r.normal(t, k, spread=1), "weight": weight}, ("x",))


def dense(r: Random, t: int, scale: int) -> Case:
    weight = Weights("prepare_dense", (r.normal(40, H * scale, dtype=torch.bfloat16),))
    return Case(
        "dense", {"x": r.normal(t, H * scale, spread=1), "weight": weight, "out_dtype": torch.float32}, ("x",), ulps=8
    )


def grouped_linear(r: Random, t: int, scale: int) -> Case:
    weight = Weights("prepare_grouped", (*r.fp8_weight(3 * 24, D * scale), 3))
    return Case("grouped_linear", {"o": r.normal(t, 3, D * scale), "weight": weight, "fp8": False}, ("o",))


def grouped_linear_fp8(r: Random, t: int, scale: int) -> Case:
    case = grouped_linear(r, t, scale)
    weight = Weights("prepare_grouped", (*r.fp8_weight(4 * 24, D * scale), 4))
    case.args |= {"o": r.normal(t, 4, D * scale, dtype=torch.bfloat16), "weight": weight, "fp8": True}
    case.ulps = 32  # an output next to a rounding boundary moves by one FP8 step
    return case


def rms_norm(r: Random, t: int, scale: int) -> Case:
    weight = r.normal(H * scale, dtype=torch.bfloat16)
    return Case("rms_norm", {"x": r.normal(t, H * scale, spread=4), "weight": weight, "eps": 1e-20}, ("x",), ulps=1)


def rope(r: Random, t: int, scale: int) -> Case:
    args = {
        "x": r.normal(t, HEADS, D * scale),
        "positions": r.ints(0, 1 << 20, t),
        "inv_freq": torch.logspace(0, -4, 16, dtype=torch.float32),
        "inverse": False,
    }
    return Case("rope", args, ("x", "positions"), given_up=("x",), ulps=1)


def hc_mix(r: Random, t: int, scale: int) -> Case:
    m, h = 4, H * scale
    args = {
        "streams": r.normal(t, m, h, spread=1),
        "fn": r.normal((2 + m) * m, m * h, dtype=torch.float32) * (m * h) ** -0.5,
        "base": r.normal((2 + m) * m, dtype=torch.float32),
        "scale": torch.tensor([0.7, 1.3, 0.9]),
        "norm_eps": 1e-20,
        "hc_eps": 1e-6,
        "iters": 20,
    }
    return Case("hc_mix", args, ("streams",), ulps=64)


def hc_collapse(r: Random, t: int, scale: int) -> Case:
    args = {"streams": r.normal(t, 4, H * scale, spread=1), "pre": torch.sigmoid(r.normal(t, 4, dtype=torch.float32))}
    return Case("hc_collapse", args, ("streams", "pre"), ulps=1)


def hc_expand(r: Random, t: int, scale: int) -> Case:
    args = {
        "out": r.normal(t, H * scale),
        "streams": r.normal(t, 4, H * scale, spread=1),
        "post": r.normal(t, 4, dtype=torch.float32),
        "comb": torch.softmax(r.normal(t, 4, 4, dtype=torch.float32), -1),
    }
    return Case("hc_expand", args, ("out", "streams", "post", "comb"), ulps=1)


def hc_site(r: Random, t: int, scale: int) -> Case:
    """``ulps`` is wide: a stream that is rounded the other way moves the weights. test_dense_ops.py looks closer."""
    before = hc_expand(r, t, scale).args
    mix = hc_mix(r, t, scale).args | {"streams": before["streams"]}
    norm = {"pre": hc_collapse(r, t, scale).args["pre"], "weight": r.normal(H * scale, dtype=torch.bfloat16)}
    return Case("hc_site", mix | before | norm, ("streams", "pre", "out", "post", "comb"), ulps=1024)


def hc_first_site(r: Random, t: int, scale: int) -> Case:
    case = hc_site(r, t, scale)
    case.args = {name: value for name, value in case.args.items() if name not in ("out", "post", "comb")}
    case.rows = case.rows[:2]
    return case


def window_pack(r: Random, t: int, scale: int) -> Case:
    return Case("window_pack", {"kv": r.normal(t, D * scale, spread=3)}, ("kv",), ulps=0)


def window_write(r: Random, t: int, scale: int) -> Case:
    args = {
        "packed": r.window(t, D * scale),
        "row_slots": r.distinct(t, t + 3),
        "positions": r.ints(0, 1000, t),
        "keep": r.mask(t),
        "ring": r.window(t + 3, 11, D * scale),
        "tags": torch.full((t + 3, 11), -1, dtype=torch.int32),
    }
    return Case("window_write", args, ("packed", "row_slots", "positions", "keep"), ("ring", "tags"), ulps=0)


def compress_pair(r: Random, t: int, scale: int) -> Case:
    args = {
        "value": r.normal(t, D * scale, dtype=torch.float32),
        "score": r.normal(t, D * scale, dtype=torch.float32) * 4,
        "positions": 2 * r.ints(0, 1000, t) + 1,
        "fresh": torch.zeros(t, dtype=torch.int64),
        "row_slots": r.ints(0, 5, t),
        "tail": r.normal(5, 7, 2, D * scale, dtype=torch.float32),
        "dtype": r.dtype,
    }
    return Case("compress_pair", args, ("value", "score", "positions", "fresh", "row_slots"), ulps=1)


def tail_write(r: Random, t: int, scale: int) -> Case:
    args = {
        "value": r.normal(t, D * scale, dtype=torch.float32),
        "score": r.normal(t, D * scale, dtype=torch.float32),
        "positions": r.ints(0, 1000, t),
        "row_slots": r.distinct(t, t + 3),
        "keep": r.mask(t),
        "tail": r.normal(t + 3, 7, 2, D * scale, dtype=torch.float32),
    }
    return Case("tail_write", args, ("value", "score", "positions", "row_slots", "keep"), ("tail",), ulps=0)


def latent_write(r: Random, t: int, scale: int) -> Case:
    values, scales = r.latents(t + 3, 8, D * scale)
    args = {
        "latent": r.normal(t, D * scale, spread=3),
        "values": values,
        "scales": scales,
        "page_ids": r.distinct(t, t + 3),
        "groups": r.ints(0, 8, t),
        "keep": r.mask(t),
    }
    return Case("latent_write", args, ("latent", "page_ids", "groups", "keep"), ("values", "scales"), ulps=0)


def index_key_write(r: Random, t: int, scale: int) -> Case:
    values, scales = r.keys(t + 3, 8, DI * scale)
    args = {
        "key": r.normal(t, DI * scale, spread=3),
        "values": values,
        "scales": scales,
        "page_ids": r.distinct(t, t + 3),
        "groups": r.ints(0, 8, t),
        "keep": r.mask(t),
    }
    return Case("index_key_write", args, ("key", "page_ids", "groups", "keep"), ("values", "scales"), ulps=0)


def index_scores(r: Random, t: int, scale: int) -> Case:
    key, key_scale = r.keys(12, 8, DI * scale)
    args = {
        "query": r.normal(t, HI, DI * scale),
        "weight": r.normal(t, HI),
        "key": key,
        "key_scale": key_scale,
        "page_table": r.ints(0, 12, 3, 5),
        "requests": r.ints(0, 3, t).sort().values,
        "visible": r.ints(0, 41, t),
        "low_precision": True,
    }
    return Case("index_scores", args, ("query", "weight", "requests", "visible"), ulps=HI)


def index_scores_deepinfer(r: Random, t: int, scale: int) -> Case:
    case = index_scores(r, t, scale)
    case.args["low_precision"] = False
    return case


def candidate_blocks(r: Random, t: int, scale: int) -> Case:
    args = {"scores": r.normal(t, 41 * scale), "visible": r.ints(0, 41 * scale + 1, t), "block_size": 4, "blocks": 3}
    return Case("candidate_blocks", args, ("scores", "visible"), ulps=0)


def top_groups(r: Random, t: int, scale: int) -> Case:
    args = {
        "scores": r.normal(t, 41 * scale).to(torch.bfloat16).to(r.dtype),
        "visible": r.ints(0, 41 * scale + 1, t),
        "k": 9,
        "candidates": r.mask(t, 41 * scale),
    }
    return Case("top_groups", args, ("scores", "visible", "candidates"), ulps=0)


def _attention(r: Random, t: int, scale: int) -> dict[str, Any]:
    d = D * scale
    return {
        "q": r.normal(t, HEADS, d) * 2,
        "window": r.window(t, d),
        "positions": r.ints(0, 60, t),
        "fresh": torch.zeros(t, dtype=torch.int64),
        "row_slots": r.ints(0, 5, t).sort().values,
        "window_floor": torch.zeros(t, dtype=torch.int64),
        "ring": r.window(5, 38, d),
        "window_len": 32,
        "latent": None,
        "latent_scale": None,
        "page_table": None,
        "requests": None,
        "selected": None,
        "sink": r.normal(HEADS, dtype=torch.float32),
        "scale": d**-0.5,
        "block_future": None,
    }


_ATTENTION_ROWS = (
    "q",
    "window",
    "positions",
    "fresh",
    "row_slots",
    "window_floor",
    "requests",
    "selected",
    "block_future",
)


def sparse_attention(r: Random, t: int, scale: int) -> Case:
    """A layer with compressed keys."""
    args = _attention(r, t, scale)
    latent, latent_scale = r.latents(12, 8, D * scale)
    selected = r.ints(-1, 40, t, 20)
    args |= {
        "latent": latent,
        "latent_scale": latent_scale,
        "page_table": r.ints(0, 12, 3, 5),
        "requests": r.ints(0, 3, t),
        "selected": selected,
    }
    return Case("sparse_attention", args, _ATTENTION_ROWS, ulps=4)


def window_attention(r: Random, t: int, scale: int) -> Case:
    """A layer without compressed keys."""
    return Case("sparse_attention", _attention(r, t, scale), _ATTENTION_ROWS, ulps=4)


def moe_gate(r: Random, t: int, scale: int) -> Case:
    args = {
        "x": r.normal(t, H * scale),
        "weight": Weights("prepare_dense", (r.normal(E, H * scale, dtype=torch.bfloat16) * 0.1,)),
        "bias": r.normal(E, dtype=torch.float32),
        "bias_vl": r.normal(E, dtype=torch.float32),
        "image_mask": r.mask(t),
        "topk": 3,
        "scale": 1.5,
    }
    return Case("moe_gate", args, ("x", "image_mask"), ulps=64)


def assign_slots(r: Random, t: int, scale: int) -> Case:
    """24 experts and 8 replicas on 4 ranks, few of them popular; more than one block of pairs from 29 rows on."""
    placed = torch.tensor([*range(24), 0, 1, 2, 3, 4, 5, 0, 1]).view(8, 4).T.flatten()
    home, slots = torch.empty(24, dtype=torch.int64), torch.full((8, 4), -1, dtype=torch.int32)
    for expert in range(24):
        held = (placed == expert).nonzero()[:, 0]
        home[expert] = held[0] if expert > 5 else -1 - expert
        if expert <= 5:
            slots[expert, held // 8] = held.int()
    chosen = (torch.rand(t, 24, generator=r.generator).log() * (torch.arange(24) + 1)).argsort(1, descending=True)
    args = {
        "ids": chosen[:, :9].contiguous(),
        "home": home,
        "shared": torch.tensor([*range(6), -1, -1], dtype=torch.int32),
        "slots": slots,
        "per_rank": 8,
        "rounds": 5 * (t % 2),
    }
    return Case("assign_slots", args, ("ids",), ulps=0, together=True)


def swiglu(r: Random, t: int, scale: int) -> Case:
    args = {
        "gate": r.normal(t, I * scale) * 8,
        "up": r.normal(t, I * scale) * 8,
        "limit": 10.0,
        "weight": torch.rand(t, generator=r.generator),
    }
    return Case("swiglu", args, ("gate", "up", "weight"), ulps=1)


def moe_experts(r: Random, t: int, scale: int) -> Case:
    h = H * scale
    ids = torch.stack([torch.randperm(E, generator=r.generator)[:3] for _ in range(t)])
    ids[r.ints(0, 10, t, 3) == 0] = -1
    args = {
        "x": r.normal(t, h),
        "weights": torch.rand(t, 3, generator=r.generator),
        "ids": ids,
        "experts": Weights("prepare_experts", (*r.mxfp4(E, 2 * I, h), *r.mxfp4(E, h, I))),
        "limit": 10.0,
    }
    return Case("moe_experts", args, ("x", "weights", "ids"), ulps=2**17)  # sums of terms rounded to bf16


def engram_hash(r: Random, t: int, scale: int) -> Case:
    args = {
        "token_classes": r.ints(-1, 90000, t),
        "positions": r.ints(0, 8, t),
        "fresh": torch.zeros(t, dtype=torch.int64),
        "row_slots": r.ints(0, 5, t),
        "ngrams": r.ints(-1, 90000, 5, 9),
        "multipliers": r.ints(0, 1 << 45, 4) * 2 + 1,
        "primes": torch.tensor([[11, 13], [17, 19], [23, 29]]),
        "offsets": torch.tensor([0, 11, 24, 41, 60, 83]),
        "pad_class": 7,
    }
    return Case("engram_hash", args, ("token_classes", "positions", "fresh", "row_slots"), ulps=0)


def ngram_write(r: Random, t: int, scale: int) -> Case:
    args = {
        "token_classes": r.ints(-1, 90000, t),
        "positions": r.ints(0, 1000, t),
        "row_slots": r.distinct(t, t + 3),
        "keep": r.mask(t),
        "ngrams": r.ints(-1, 90000, t + 3, 9),
    }
    return Case("ngram_write", args, ("token_classes", "positions", "row_slots", "keep"), ("ngrams",), ulps=0)


def engram_gather(r: Random, t: int, scale: int) -> Case:
    table, table_scale = formats.fp8_cast(r.normal(50, DI * scale, dtype=torch.float32, spread=2))
    args = {"rows": r.ints(0, 50, t, 6), "table": table, "scale": table_scale, "dtype": r.dtype}
    return Case("engram_gather", args, ("rows",), ulps=0)


def engram_gate(r: Random, t: int, scale: int) -> Case:
    h = H * scale
    args = {
        "streams": r.normal(t, 4, h, spread=1),
        "kv": r.normal(t, 5 * h),
        "q_weight": r.normal(4, h, dtype=torch.bfloat16),
        "k_weight": r.normal(4, h, dtype=torch.bfloat16),
        "eps": 1e-20,
        "live": r.mask(t),
    }
    return Case("engram_gate", args, ("streams", "kv", "live"), ulps=1)


def markov(r: Random, t: int, scale: int) -> Case:
    args = {
        "prev": r.ints(0, 70, t),
        "embed": r.normal(70, 16 * scale, dtype=torch.bfloat16),
        "head": Weights("prepare_dense", (r.normal(70, 16 * scale, dtype=torch.bfloat16),)),
    }
    return Case("markov", args, ("prev",), ulps=8)


def confidence(r: Random, t: int, scale: int) -> Case:
    args = {
        "hidden": r.normal(t, H * scale),
        "e": r.normal(t, 16, dtype=torch.bfloat16),
        "proj": r.normal(1, H * scale + 16, dtype=torch.bfloat16),
    }
    return Case("confidence", args, ("hidden", "e"), ulps=64)


BUILDERS: dict[str, Callable[[Random, int, int], Case]] = {
    build.__name__: build
    for build in (
        linear,
        dense,
        grouped_linear,
        grouped_linear_fp8,
        rms_norm,
        rope,
        hc_mix,
        hc_collapse,
        hc_expand,
        hc_site,
        hc_first_site,
        window_pack,
        window_write,
        compress_pair,
        tail_write,
        latent_write,
        index_key_write,
        index_scores,
        index_scores_deepinfer,
        candidate_blocks,
        top_groups,
        sparse_attention,
        window_attention,
        moe_gate,
        assign_slots,
        swiglu,
        moe_experts,
        engram_hash,
        ngram_write,
        engram_gather,
        engram_gate,
        markov,
        confidence,
    )
}


def make(name: str, dtype: torch.dtype, rows: int = 7, seed: int = 0, scale: int = 1) -> Case:
    """The case called ``name``; ``scale`` multiplies its channels."""
    return BUILDERS[name](Random(seed, dtype), rows, scale)
