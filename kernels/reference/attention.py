"""Attention over window keys and selected compressed groups in one softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from . import formats
from .memory import window_unpack
from .numeric import row_chunks, tree_sum

SOFTMAX_BLOCK = 64  # keys that share one running maximum
EMPTY_MAX = -1e30  # running maximum before any key


def round_up(n: int) -> int:
    return -(-n // SOFTMAX_BLOCK) * SOFTMAX_BLOCK


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
    table, key_ids = _window_keys(window, positions, fresh, row_slots, window_floor, ring, window_len, block_future)
    slots = key_ids.shape[1] + (0 if selected is None else round_up(selected.shape[1]))
    out = torch.empty_like(q)
    for part in row_chunks(rows, slots * (3 * size + 4 * heads + heads * size // SOFTMAX_BLOCK) * 8):
        ids = key_ids[part]
        keys, present = [table.index_select(0, ids.flatten()).view(*ids.shape, size)], ids > 0
        if selected is not None:
            assert latent is not None and latent_scale is not None and page_table is not None and requests is not None
            more, there = _selected_keys(latent, latent_scale, page_table[requests[part]], selected[part])
            keys.append(more)
            present = torch.cat((present, there), 1)
        out[part] = _attend(q[part], keys, present, sink, scale)
    return out


def _window_keys(
    window: Tensor,
    positions: Tensor,
    fresh: Tensor,
    row_slots: Tensor,
    window_floor: Tensor,
    ring: Tensor,
    window_len: int,
    block_future: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Keys float64 [1 + R + slots * L, D] of the batch and its rings; int64 [R, n] those each row reads, oldest first.

    Key 0 is zero and stands for an absent one, so what lies in unwritten ring rows never matters.
    """
    rows, length = positions.shape[0], ring.shape[1]
    used, local = torch.unique_consecutive(row_slots, return_inverse=True)  # rows of a request are contiguous
    keys = window_unpack(torch.cat((window, ring[used].flatten(0, 1))))
    table = torch.cat((torch.zeros_like(keys[:1]), keys)).to(torch.float64)

    if block_future is None:
        first, last = positions - window_len + 1, positions
        width = window_len
    else:
        first, last = window_floor, positions + block_future
        width = max(1, int((last - first).max()) + 1)
    position = first[:, None] + torch.arange(round_up(width), device=positions.device)
    lowest = torch.clamp(torch.maximum(first, window_floor), min=0)
    present = (position >= lowest[:, None]) & (position <= last[:, None])
    back = positions[:, None] - position
    from_batch = 1 + torch.arange(rows, device=positions.device)[:, None] - back
    from_ring = 1 + rows + local[:, None] * length + position % length
    return table, torch.where(back <= fresh[:, None], from_batch, from_ring).masked_fill_(~present, 0)


def _selected_keys(latent: Tensor, latent_scale: Tensor, pages: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    """Keys float64 [n, K rounded up, D] of selected groups (-1 absent), pages int64 [n, P] of each row's request."""
    groups = latent.shape[1]
    padded = torch.full((selected.shape[0], round_up(selected.shape[1])), -1, dtype=torch.int64, device=selected.device)
    padded[:, : selected.shape[1]] = selected
    present = padded >= 0
    group = padded.clamp(min=0)
    page = pages.gather(1, group // groups)
    row = group % groups
    # A zero scale makes an absent key zero, whatever bytes lie there.
    scale = latent_scale[page, row].masked_fill_(~present[..., None], 0)
    return formats.latent_dequant(latent[page, row], scale).to(torch.float64), present


def _attend(q: Tensor, keys: list[Tensor], present: Tensor, sink: Tensor, scale: float) -> Tensor:
    """q [n, heads, D]; keys: runs of float64 [n, S, D], S a multiple of SOFTMAX_BLOCK; present bool [n, sum of S]."""
    rounds = q.dtype == torch.bfloat16
    wide = q.to(torch.float64)
    dots = [wide @ run.mT for run in keys]
    logits = ((dots[0] if len(dots) == 1 else torch.cat(dots, -1)) * scale).to(torch.float32).to(torch.float64)
    logits.masked_fill_(~present[:, None], -torch.inf)
    blocks = logits.unflatten(-1, (-1, SOFTMAX_BLOCK))  # [n, heads, blocks, SOFTMAX_BLOCK]
    running = torch.cummax(blocks.amax(-1), -1).values.clamp_(min=EMPTY_MAX)
    top = running[..., -1:]
    p = torch.exp(blocks - running[..., None])
    # A block's probabilities are relative to the maximum known when it is read and rounded there; later ones rescale.
    rescale = torch.exp(running - top)
    total = tree_sum(tree_sum(p) * rescale)[..., None] + torch.exp(sink.to(torch.float64)[:, None] - top)
    p = p.to(torch.bfloat16 if rounds else torch.float32).to(torch.float64)
    p, first, out = p.transpose(1, 2), 0, torch.zeros_like(wide)
    for run in keys:
        run = run.unflatten(1, (-1, SOFTMAX_BLOCK))
        sums = p[:, first : first + run.shape[1]] @ run  # [n, blocks, heads, D]
        for block in range(run.shape[1]):
            out += sums[:, block] * rescale[..., first + block, None]
        first += run.shape[1]
    return (out / total).masked_fill_(total == 0, 0).to(q.dtype)
