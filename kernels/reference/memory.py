"""Reads and writes of request state and pages. Ids are int64, so an id times a stride may exceed 2^31 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from . import formats


def window_pack(kv: Tensor) -> Tensor:
    values, scale = formats.fp8_cast(kv)
    return torch.cat((values.view(torch.uint8), scale.view(torch.uint8)), -1)


def window_unpack(packed: Tensor) -> Tensor:
    """uint8 [..., D + D/32] -> float32 [..., D]."""
    size = packed.shape[-1] * formats.BLOCK // (formats.BLOCK + 1)
    return formats.fp8_dequant(packed[..., :size].view(formats.E4M3), packed[..., size:])


def window_write(
    packed: Tensor, row_slots: Tensor, positions: Tensor, keep: Tensor, ring: Tensor, tags: Tensor
) -> None:
    slots, kept = row_slots[keep], positions[keep]
    at = kept % ring.shape[1]
    ring[slots, at] = packed[keep]
    tags[slots, at] = kept.to(torch.int32)


def tail_write(value: Tensor, score: Tensor, positions: Tensor, row_slots: Tensor, keep: Tensor, tail: Tensor) -> None:
    slots, at = row_slots[keep], positions[keep] % tail.shape[1]
    tail[slots, at] = torch.stack((value[keep], score[keep]), 1)


def compress_pair(
    value: Tensor,
    score: Tensor,
    positions: Tensor,
    fresh: Tensor,
    row_slots: Tensor,
    tail: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    second = positions % 2 == 1
    before = tail[row_slots, (positions - 1) % tail.shape[1]]
    in_batch = (fresh > 0)[:, None]
    earlier = torch.arange(-1, positions.shape[0] - 1, device=positions.device).clamp_(min=0)
    value0 = torch.where(in_batch, value[earlier], before[:, 0]).to(torch.float64)
    score0 = torch.where(in_batch, score[earlier], before[:, 1]).to(torch.float64)
    value1, score1 = value.to(torch.float64), score.to(torch.float64)
    top = torch.maximum(score0, score1)
    weight0, weight1 = torch.exp(score0 - top), torch.exp(score1 - top)
    pooled = (value0 * weight0 + value1 * weight1) / (weight0 + weight1)
    return torch.where(second[:, None], pooled, 0.0).to(dtype)


def latent_write(
    latent: Tensor, values: Tensor, scales: Tensor, page_ids: Tensor, groups: Tensor, keep: Tensor
) -> None:
    packed, scale = formats.latent_cast(latent[keep])
    _page_write(packed, scale, values, scales, page_ids[keep], groups[keep])


def index_key_write(
    key: Tensor, values: Tensor, scales: Tensor, page_ids: Tensor, groups: Tensor, keep: Tensor
) -> None:
    packed, scale = formats.index_cast(key[keep])
    _page_write(packed, scale, values, scales, page_ids[keep], groups[keep])


def _page_write(packed: Tensor, scale: Tensor, values: Tensor, scales: Tensor, pages: Tensor, groups: Tensor) -> None:
    values[pages, groups] = packed
    scales[pages, groups] = scale.view(torch.uint8)


def ngram_write(token_classes: Tensor, positions: Tensor, row_slots: Tensor, keep: Tensor, ngrams: Tensor) -> None:
    ngrams[row_slots[keep], positions[keep] % ngrams.shape[1]] = token_classes[keep]
