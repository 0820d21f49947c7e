"""Our TileLang kernels with the shapes of the released model and of a small one: what tier B lowers and tier C runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer_plugin.kernels.ascend import tiles  # noqa: F401
from deepinfer_plugin.kernels.ascend.tiles import (
    candidate_blocks,
    collapse,
    compress_pair,
    confidence,
    engram_gate,
    engram_gather,
    engram_hash,
    expand,
    experts,
    index_scores,
    markov,
    mix,
    norm,
    page_write,
    rope,
    row_write,
    sparse_attention,
    swiglu,
    top_groups,
    window_pack,
)

BF16, F32, I32, I64, U8 = torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8


@dataclass(frozen=True)
class TileCase:
    """A kernel and a way to make its tensors; the shapes are ``released`` or ``small``."""

    op: str
    kernel: Any
    tensors: Callable[..., tuple[Tensor, ...]]
    released: dict[str, int]
    small: dict[str, int]


def e(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def pages(r: int, d: int, g: int, block: int) -> tuple[Tensor, ...]:
    values, scales = e(5, g, d // 8, dtype=I32), e(5, g, d // (4 * block), dtype=I32)
    return e(r, d), values, scales, e(r, dtype=I64), e(r, dtype=I64), e(r, dtype=I32)


def stored(r: int, places: int, w: int) -> tuple[Tensor, ...]:
    return e(r, w, dtype=U8), e(5, places, w, dtype=U8), e(r, dtype=I64), e(r, dtype=I64), e(r, dtype=I32)


def turned(r: int, a: int, d: int, n: int) -> tuple[Tensor, ...]:
    return e(r, a, d), e(r, dtype=F32), e(n, dtype=F32), e(r, a, d)


def normed(r: int, d: int) -> tuple[Tensor, ...]:
    return e(r, d), e(d), e(r, d)


def mixed(r: int, o: int, k: int) -> tuple[Tensor, ...]:
    return e(r, k), *(e(*shape, dtype=F32) for shape in ((o, k), (o,), (8,), (r, o)))


def attended(r: int, h: int, d: int, length: int, g: int, k: int) -> tuple[Tensor, ...]:
    width = d // 4 + d // 128
    packed = e(r, width, dtype=I32), e(5, length, width, dtype=I32)
    latents = e(7, g, d // 8, dtype=I32), e(7, g, d // 64, dtype=I32), e(3, 4, dtype=I64), e(r, dtype=I64)
    chosen = e(r, k, dtype=I64), e(r, dtype=I32)
    return e(r, h, d), *packed, *latents, *chosen, *(e(r, dtype=I64) for _ in range(6)), e(h, dtype=F32), e(r, h, d)


def grouped(a: int, m: int, k: int, n: int) -> tuple[Tensor, ...]:
    weights = e(5, n, k // 8, dtype=I32), e(5, n, k // 128, dtype=I32)
    return e(a, m, k), *weights, e(a, dtype=I64), e(1, dtype=I32), e(a, m, n)


CASES = {
    "mix": TileCase("hc_mix", mix.mixed, mixed, {"o": 24, "k": 20480}, {"o": 24, "k": 1280}),
    "collapse": TileCase(
        "hc_collapse",
        collapse.collapse,
        lambda r, m, h: (e(r, m, h), e(r, m, dtype=F32), e(r, h)),
        {"m": 4, "h": 5120},
        {"m": 4, "h": 192},
    ),
    "expand": TileCase(
        "hc_expand",
        expand.expand,
        lambda r, m, h: (e(r, h), e(r, m, h), e(r, m, dtype=F32), e(r, m, m, dtype=F32), e(r, m, h)),
        {"m": 4, "h": 5120},
        {"m": 4, "h": 192},
    ),
    "swiglu": TileCase(
        "swiglu",
        swiglu.gated,
        lambda r, i: (e(r, i), e(r, i), e(r, dtype=F32), e(r, i)),
        {"i": 2304},
        {"i": 64},
    ),
    "norm": TileCase("rms_norm", norm.normed, normed, {"d": 5120}, {"d": 192}),
    "norm q": TileCase("rms_norm", norm.normed, normed, {"d": 1280}, {"d": 128}),
    "rope": TileCase(
        "rope",
        rope.turned,
        turned,
        {"a": 64, "d": 512, "n": 32},
        {"a": 4, "d": 64, "n": 16},
    ),
    "rope index": TileCase(
        "rope",
        rope.turned,
        turned,
        {"a": 32, "d": 128, "n": 32},
        {"a": 1, "d": 64, "n": 16},
    ),
    "window_pack": TileCase(
        "window_pack",
        window_pack.pack,
        lambda r, d: (e(r, d), e(r, (d + d // 32) // 4, dtype=I32)),
        {"d": 512},
        {"d": 128},
    ),
    "index_key_write": TileCase(
        "index_key_write",
        page_write.index_rows,
        lambda r, d, g: pages(r, d, g, 32),
        {"d": 128, "g": 64},
        {"d": 128, "g": 8},
    ),
    "latent_write": TileCase(
        "latent_write",
        page_write.latent_rows,
        lambda r, d, g: pages(r, d, g, 16),
        {"d": 512, "g": 64},
        {"d": 64, "g": 8},
    ),
    "row_write ring": TileCase(
        "window_write",
        row_write.store,
        stored,
        {"places": 134, "w": 528},
        {"places": 11, "w": 66},
    ),
    "row_write tail": TileCase(
        "tail_write",
        row_write.store,
        stored,
        {"places": 7, "w": 4096},
        {"places": 7, "w": 512},
    ),
    "row_write ngram": TileCase(
        "ngram_write",
        row_write.store,
        stored,
        {"places": 9, "w": 8},
        {"places": 9, "w": 4},
    ),
    "compress_pair": TileCase(
        "compress_pair",
        compress_pair.pool,
        lambda r, d, places: (
            e(r, d, dtype=F32),
            e(r, d, dtype=F32),
            e(r, d),
            e(r, dtype=I64),
            e(r, dtype=I64),
            e(r, dtype=I64),
            e(5, places, 2, d, dtype=F32),
        ),
        {"d": 512, "places": 7},
        {"d": 64, "places": 7},
    ),
    "engram_gather": TileCase(
        "engram_gather",
        engram_gather.gather,
        lambda r, d: (e(50, d // 4, dtype=I32), e(50, d // 32, dtype=U8), e(r, dtype=I64), e(r, d)),
        {"d": 256},
        {"d": 64},
    ),
    "engram_gate": TileCase(
        "engram_gate",
        engram_gate.gated_streams,
        lambda r, m, h: (e(r, m, h), e(r, m + 1, h), e(m, h), e(m, h), e(r, dtype=I32), e(r, m, h)),
        {"m": 4, "h": 5120},
        {"m": 4, "h": 192},
    ),
    "engram_hash": TileCase(
        "engram_hash",
        engram_hash.hashed,
        lambda r, places, p: (
            *(e(r, dtype=I64) for _ in range(4)),
            e(5, places, dtype=I64),
            e(4, dtype=I64),
            e(p, dtype=I64),
            e(p, dtype=I64),
            e(r, p, dtype=I64),
        ),
        {"places": 9, "p": 24},
        {"places": 9, "p": 6},
    ),
    "index_scores": TileCase(
        "index_scores",
        index_scores.page_scores,
        lambda r, h, g: (
            *(e(r, h, 128), e(r, h), e(5, g, 16, dtype=I32), e(5, g // 8, 8, dtype=I32)),
            *(e(3, 4, dtype=I64), e(r, dtype=I64), e(r, dtype=I32), e(r, 4 * g // 16, 16)),
        ),
        {"h": 32, "g": 64},
        {"h": 32, "g": 32},
    ),
    "candidate_blocks": TileCase(
        "candidate_blocks",
        candidate_blocks.kept,
        lambda r, g: (e(r, g), e(r, dtype=I32), e(r, g // 4, dtype=I32)),
        {"g": 65536},
        {"g": 4096},
    ),
    "top_groups": TileCase(
        "top_groups",
        top_groups.best,
        lambda r, g, k: (e(r, g), e(r, dtype=I32), e(r, g, dtype=U8), e(r, k, dtype=I64)),
        {"g": 32768, "k": 512},
        {"g": 1024, "k": 256},
    ),
    "sparse_attention": TileCase(
        "sparse_attention",
        sparse_attention.attended,
        attended,
        {"h": 64, "d": 512, "length": 134, "g": 64, "k": 512},
        {"h": 32, "d": 128, "length": 38, "g": 8, "k": 100},
    ),
    "sparse_attention window": TileCase(  # of layers without latents
        "sparse_attention",
        sparse_attention.attended,
        attended,
        {"h": 64, "d": 512, "length": 134, "g": 1, "k": 1},
        {"h": 32, "d": 128, "length": 38, "g": 1, "k": 1},
    ),
    "moe_experts": TileCase(
        "moe_experts",
        experts.grouped,
        grouped,
        {"m": experts.FEW, "k": 5120, "n": 4608},
        {"m": experts.FEW, "k": 256, "n": 128},
    ),
    "moe_experts many": TileCase(  # the other product, of many rows
        "moe_experts",
        experts.grouped,
        grouped,
        {"m": experts.MANY, "k": 2304, "n": 5120},
        {"m": experts.MANY, "k": 256, "n": 64},
    ),
    "markov": TileCase(
        "markov",
        markov.bias,
        lambda r, v, d: (e(r, d), e(v, d), e(r, v, dtype=F32)),
        {"v": 129280, "d": 256},
        {"v": 192, "d": 32},
    ),
    "confidence": TileCase(
        "confidence",
        confidence.product,
        lambda r, h, n: (e(r, h), e(r, n), e(h + n), e(r, 8, dtype=F32)),
        {"h": 5120, "n": 256},
        {"h": 192, "n": 32},
    ),
}
