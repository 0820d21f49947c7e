"""Writes to request state and pages, and the pooling of pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from . import formats, places


def window_pack(kv: Tensor) -> Tensor:
    if kv.shape[0] == 0:
        return kv.new_empty(0, kv.shape[1] + kv.shape[1] // formats.BLOCK, dtype=torch.uint8)
    return torch.cat(formats.fp8_cast(kv), -1)


def window_write(
    packed: Tensor, row_slots: Tensor, positions: Tensor, keep: Tensor, ring: Tensor, tags: Tensor
) -> None:
    at = positions % ring.shape[1]
    places.write(ring, packed, keep, row_slots, at)
    places.write(tags[..., None], positions.to(torch.int32), keep, row_slots, at)


def compress_pair(
    value: Tensor,
    score: Tensor,
    positions: Tensor,
    fresh: Tensor,
    row_slots: Tensor,
    tail: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    if value.shape[0] == 0:
        return value.to(dtype)
    before = places.read(tail, row_slots, (positions - 1) % tail.shape[1])
    in_batch = (fresh > 0)[:, None]
    value0 = torch.where(in_batch, value.roll(1, 0), before[:, 0])
    score0 = torch.where(in_batch, score.roll(1, 0), before[:, 1])
    top = torch.maximum(score0, score)
    weight0, weight1 = torch.exp(score0 - top), torch.exp(score - top)
    pooled = (value0 * weight0 + value * weight1) / (weight0 + weight1)
    return torch.where((positions % 2 == 1)[:, None], pooled, 0.0).to(dtype)


def tail_write(value: Tensor, score: Tensor, positions: Tensor, row_slots: Tensor, keep: Tensor, tail: Tensor) -> None:
    places.write(tail, torch.stack((value, score), 1), keep, row_slots, positions % tail.shape[1])


def latent_write(
    latent: Tensor, values: Tensor, scales: Tensor, page_ids: Tensor, groups: Tensor, keep: Tensor
) -> None:
    packed, scale = formats.latent_cast(latent)
    places.write(values, packed, keep, page_ids, groups)
    places.write(scales, scale, keep, page_ids, groups)


def index_key_write(
    key: Tensor, values: Tensor, scales: Tensor, page_ids: Tensor, groups: Tensor, keep: Tensor
) -> None:
    packed, scale = formats.index_cast(key)
    places.write(values, packed, keep, page_ids, groups)
    places.write(scales, scale, keep, page_ids, groups)


def ngram_write(token_classes: Tensor, positions: Tensor, row_slots: Tensor, keep: Tensor, ngrams: Tensor) -> None:
    places.write(ngrams[..., None], token_classes, keep, row_slots, positions % ngrams.shape[1])
