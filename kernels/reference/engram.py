"""Engram: hashes of the last n-grams, rows of the hash table, and the gate into the residual streams."""

from __future__ import annotations

import torch
from torch import Tensor

from . import formats
from .numeric import sigmoid, square_mean, tree_sum

_GATE_FLOOR = 1e-6


def engram_hash(
    token_classes: Tensor,
    positions: Tensor,
    fresh: Tensor,
    row_slots: Tensor,
    ngrams: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_class: int,
) -> Tensor:
    rows = torch.arange(positions.shape[0], device=positions.device)
    dead = token_classes < 0
    rolling = torch.where(dead, pad_class, token_classes) * multipliers[0]
    hashes = []
    for back in range(1, multipliers.shape[0]):
        in_batch = token_classes[(rows - back).clamp_(min=0)]
        earlier = torch.where(fresh >= back, in_batch, ngrams[row_slots, (positions - back) % ngrams.shape[1]])
        dead = dead | (positions < back) | (earlier < 0)
        rolling = rolling ^ (torch.where(dead, pad_class, earlier) * multipliers[back])
        hashes.append(rolling[:, None] % primes[back - 1])
    return torch.cat(hashes, -1) + offsets


def engram_gather(rows: Tensor, table: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    values = table.view(torch.uint8)[rows].view(formats.E4M3)
    return formats.fp8_dequant(values, scale.view(torch.uint8)[rows]).to(dtype).flatten(1)


def engram_gate(streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, live: Tensor) -> Tensor:
    m, size = streams.shape[1:]
    key, value = kv[:, : m * size].unflatten(-1, (m, size)), kv[:, m * size :]
    wide = streams.to(torch.float64)
    weight = q_weight.to(torch.float64) * k_weight.to(torch.float64)
    dot = tree_sum(wide * weight * key.to(torch.float64))
    norm = torch.sqrt((square_mean(streams) + eps) * (square_mean(key) + eps)).squeeze(-1)
    match = dot / norm * size**-0.5
    gate = sigmoid(torch.copysign(match.abs().clamp(min=_GATE_FLOOR).sqrt(), match))
    moved = (wide + gate[..., None] * value.to(torch.float64)[:, None]).to(streams.dtype)
    return torch.where(live[:, None, None], moved, streams)
