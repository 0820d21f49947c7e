"""Engram: hashes of the last n-grams, rows of the hash table, and the gate into the residual streams."""

from __future__ import annotations

import torch
from torch import Tensor

from . import formats, places

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
    if token_classes.shape[0] == 0:
        return token_classes.new_empty(0, offsets.shape[0])
    dead = token_classes < 0
    rolling = torch.where(dead, pad_class, token_classes) * multipliers[0]
    hashes = []
    for back in range(1, multipliers.shape[0]):
        kept = places.read(ngrams[..., None], row_slots, (positions - back) % ngrams.shape[1])[..., 0]
        earlier = torch.where(fresh >= back, token_classes.roll(back, 0), kept)
        dead = dead | (positions < back) | (earlier < 0)
        rolling = rolling ^ (torch.where(dead, pad_class, earlier) * multipliers[back])
        hashes.append(rolling[:, None] % primes[back - 1])
    return torch.cat(hashes, -1) + offsets


def engram_gather(rows: Tensor, table: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A table that lies in host memory or in a file is read there: only its rows are moved."""
    ids, device = rows.flatten().to(table.device), rows.device
    values = table.view(torch.uint8).index_select(0, ids).to(device)
    scales = scale.view(torch.uint8).index_select(0, ids).to(device)
    wide = formats.fp8_dequant(values, scales).to(dtype)
    return wide.view(rows.shape[0], rows.shape[1] * table.shape[1])


def engram_gate(streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, live: Tensor) -> Tensor:
    m, size = streams.shape[1:]
    key, value = kv[:, : m * size].unflatten(-1, (m, size)).to(torch.float32), kv[:, m * size :].to(torch.float32)
    wide = streams.to(torch.float32)
    weight = q_weight.to(torch.float32) * k_weight.to(torch.float32)
    dot = (wide * weight * key).sum(-1)
    # Two roots: the product of both means may underflow.
    norm = torch.sqrt((wide * wide).mean(-1) + eps) * torch.sqrt((key * key).mean(-1) + eps)
    match = dot / norm * size**-0.5
    root = torch.sqrt(match.abs().clamp(min=_GATE_FLOOR))
    gate = torch.sigmoid(torch.where(match < 0, -root, root))
    moved = (wide + gate[..., None] * value[:, None]).to(streams.dtype)
    return torch.where(live[:, None, None], moved, streams)
