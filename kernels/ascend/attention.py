"""Attention over window keys and selected groups, composed of plain operations: keys are gathered and dequantised in
float32, some rows at a time, and every row attends to its own."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.attention import EMPTY_MAX, SOFTMAX_BLOCK, round_up
from . import formats, places

MOST_DRAFTS = 64  # rows of a draft block at most; how many there are is known on the device only
CHUNK_BYTES = 256 << 20


def sparse_attention(
    q: Tensor,
    window: Tensor,
    positions: Tensor,
    fresh: Tensor,
    row_slots: Tensor,
    window_floor: Tensor,
    ring: Tensor,
    window_len: int,
    latent: Tensor | None,
    latent_scale: Tensor | None,
    page_table: Tensor | None,
    requests: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    scale: float,
    block_future: Tensor | None,
) -> Tensor:
    rows, heads, size = q.shape
    if rows == 0:
        return torch.empty_like(q)
    slots = window_slots(rows, ring, window_len, block_future)
    slots += 0 if selected is None else round_up(selected.shape[1])
    # Gathering takes an int64 address a word, at worst a byte.
    step = max(1, CHUNK_BYTES // (slots * (12 * size + 12 * heads)))
    out = []
    for first in range(0, rows, step):
        part = slice(first, min(rows, first + step))
        future = None if block_future is None else block_future[part]
        packed, there = window_rows(
            window, first, positions[part], fresh[part], row_slots[part], window_floor[part], ring, window_len, future
        )
        keys = _fp8_keys(packed)
        if selected is not None:
            assert latent is not None and latent_scale is not None and page_table is not None and requests is not None
            values, scales, also = selected_rows(latent, latent_scale, page_table[requests[part]], selected[part])
            keys = torch.cat((keys, formats.latent_dequant(values, scales)), 1)
            there = torch.cat((there, also), 1)
        keys = torch.where(there[..., None], keys, 0.0)
        out.append(_attend(q[part], keys, there, sink, scale))
    return torch.cat(out)


def window_rows(
    window: Tensor,
    first_row: int,
    positions: Tensor,
    fresh: Tensor,
    row_slots: Tensor,
    window_floor: Tensor,
    ring: Tensor,
    window_len: int,
    block_future: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Packed window keys uint8 [n, S, D + D/32] of the rows from ``first_row`` on, oldest first, and whether each is
    there, bool [n, S]; absent keys may be anything."""
    if block_future is None:
        first, last = positions - window_len + 1, positions
    else:
        first, last = torch.clamp(window_floor, min=0), positions + block_future
    slots = window_slots(window.shape[0], ring, window_len, block_future)
    position = first[:, None] + torch.arange(slots, device=positions.device)
    lowest = torch.clamp(torch.maximum(first, window_floor), min=0)
    there = (position >= lowest[:, None]) & (position <= last[:, None])
    back = positions[:, None] - position
    row = first_row + torch.arange(positions.shape[0], device=positions.device)[:, None] - back
    in_batch = window.index_select(0, row.clamp(0, window.shape[0] - 1).flatten()).view(*row.shape, -1)
    in_ring = places.read(ring, row_slots[:, None].expand_as(position), position % ring.shape[1])
    return torch.where((back <= fresh[:, None])[..., None], in_batch, in_ring), there


def window_slots(rows: int, ring: Tensor, window_len: int, block_future: Tensor | None) -> int:
    """Keys of a row's window, whole softmax blocks."""
    return round_up(window_len if block_future is None else ring.shape[1] + min(rows, MOST_DRAFTS))


def selected_rows(
    latent: Tensor, latent_scale: Tensor, pages: Tensor, selected: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed latents uint8 [n, K, D/2], their scales uint8 [n, K, D/16] and whether each is there, bool [n, K], of the
    groups int64 [n, K'] in pages int64 [n, P]; K is K' in whole softmax blocks. Absent ones may be anything."""
    padding = round_up(selected.shape[1]) - selected.shape[1]
    selected = torch.nn.functional.pad(selected, (0, padding), value=-1)
    there = selected >= 0
    group, groups = selected.clamp(min=0), latent.shape[1]
    # Where nothing is selected the page may be anything.
    page = pages.gather(1, group // groups).masked_fill(~there, 0)
    at = group % groups
    return places.read(latent, page, at), places.read(latent_scale, page, at), there


def _fp8_keys(packed: Tensor) -> Tensor:
    size = packed.shape[-1] * formats.BLOCK // (formats.BLOCK + 1)
    return formats.fp8_dequant(packed[..., :size], packed[..., size:].contiguous())


def _attend(q: Tensor, keys: Tensor, there: Tensor, sink: Tensor, scale: float) -> Tensor:
    logits = torch.bmm(q.to(torch.float32), keys.mT) * scale
    logits = logits.masked_fill(~there[:, None], -torch.inf)
    blocks = logits.unflatten(-1, (-1, SOFTMAX_BLOCK))  # [n, heads, blocks, SOFTMAX_BLOCK]
    running = [blocks[..., 0, :].amax(-1).clamp(min=EMPTY_MAX)]
    for block in range(1, blocks.shape[2]):
        running.append(torch.maximum(running[-1], blocks[..., block, :].amax(-1)))
    top, highest = running[-1], torch.stack(running, -1)
    rescale = torch.exp(highest - top[..., None])
    p = torch.exp(blocks - highest[..., None])
    total = (p.sum(-1) * rescale).sum(-1) + torch.exp(sink[:, None].mT - top)
    # A block's probabilities are rounded relative to the maximum known when it is read; later ones rescale.
    p = p.to(q.dtype).to(torch.float32) * rescale[..., None]
    out = torch.bmm(p.flatten(-2), keys) / total[..., None]
    return torch.where((total == 0)[..., None], 0.0, out).to(q.dtype)
