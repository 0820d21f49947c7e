"""Attention: ``flash_mla.flash_mla_with_kvcache``, which attends to FP8/32 window keys and FP4+E4M3/16 latents in one
softmax.

The library finds a key at one address. Ours lie in several places: window keys in the rows of this batch or in a ring,
a latent in one section of its page and its scales in another. So the keys of every row are first copied into rows of
their own, 67 KB of window keys and 147 KB of latents at released size: a few microseconds of a B200's memory for 64
rows.

Heads are padded to what the library serves. Other sizes, and float32 rows, run the cuda provider's kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cuda import attention as triton_attention
from ..flash_mla import attend

CHANNELS, HEADS = 512, (64, 128)
KEYS = 64  # lists of keys have a multiple of so many
MOST_ROWS = 1024  # whose keys are copied at a time, 220 MB at released size


@triton.jit
def _gather_window(
    window, positions, fresh, row_slots, window_floor, block_future, ring, keys, indices,
    base, window_row, ring_slot, ring_row, window_len, ring_len, slots: tl.constexpr, width: tl.constexpr,
    WIDTH: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position, floor = tl.load(positions + row), tl.load(window_floor + row)
    if block_future is None:
        first, last = position - window_len + 1, position
    else:
        first, last = floor, position + tl.load(block_future + row)
    slot = tl.program_id(1) * EACH + tl.arange(0, EACH)
    at = first + slot
    present = (at >= tl.maximum(tl.maximum(first, floor), 0)) & (at <= last)
    back = position - at
    in_batch = back <= tl.load(fresh + row)
    batch = (base + row - back) * window_row
    own = tl.load(row_slots + row) * ring_slot + at % ring_len * ring_row
    byte = tl.arange(0, WIDTH)[None, :]
    inside = (byte < width) & present[:, None]
    x = tl.load(window + batch[:, None] + byte, mask=inside & in_batch[:, None], other=0)
    y = tl.load(ring + own[:, None] + byte, mask=inside & ~in_batch[:, None], other=0)
    place = row * slots + slot
    tl.store(keys + place[:, None] * width + byte, x | y, mask=(byte < width) & (slot < slots)[:, None])
    tl.store(indices + place, tl.where(present, place, -1).to(tl.int32), mask=slot < slots)


@triton.jit
def _gather_latents(
    latent, latent_scale, page_table, requests, selected, keys, indices,
    latent_page, latent_group, scale_page, scale_group, table_row, table_page, selected_row, selected_place,
    groups, chosen, slots: tl.constexpr, half: tl.constexpr, scales: tl.constexpr,
    HALF: tl.constexpr, SCALES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * EACH + tl.arange(0, EACH)
    group = tl.load(selected + row * selected_row + slot * selected_place, mask=slot < chosen, other=-1)
    present = group >= 0
    table = page_table + tl.load(requests + row) * table_row
    page = tl.load(table + group // groups * table_page, mask=present, other=0)
    group = group % groups
    place = row * slots + slot
    written = (slot < slots)[:, None]
    out = keys + place[:, None] * (half + scales)
    byte = tl.arange(0, HALF)[None, :]
    at = page * latent_page + group * latent_group
    x = tl.load(latent + at[:, None] + byte, mask=present[:, None] & (byte < half), other=0)
    tl.store(out + byte, x, mask=written & (byte < half))
    byte = tl.arange(0, SCALES)[None, :]
    at = page * scale_page + group * scale_group
    x = tl.load(latent_scale + at[:, None] + byte, mask=present[:, None] & (byte < scales), other=0)
    tl.store(out + half + byte, x, mask=written & (byte < scales))
    tl.store(indices + place, tl.where(present, place, -1).to(tl.int32), mask=slot < slots)


EACH = 32  # keys of a program


def gather_window(
    window: Tensor,
    base: int,
    positions: Tensor,
    fresh: Tensor,
    row_slots: Tensor,
    window_floor: Tensor,
    ring: Tensor,
    window_len: int,
    block_future: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Packed keys uint8 [R, S, D + D/32] of rows of a batch from row ``base`` on, oldest first, zero where absent, and
    their numbers int32 [R, 1, S] among all, -1 where absent. window: of the whole batch; the others int64 [R], of these
    rows. A draft block and its window are at most a ring long."""
    rows, width = positions.shape[0], window.shape[1]
    length = window_len if block_future is None else ring.shape[1]
    slots = -(-length // KEYS) * KEYS
    window = window if window.stride(1) == 1 else window.contiguous()
    ring = ring if ring.stride(2) == 1 else ring.contiguous()
    keys = torch.empty(rows, slots, width, dtype=torch.uint8, device=window.device)
    indices = torch.empty(rows, 1, slots, dtype=torch.int32, device=window.device)
    ids = (positions, fresh, row_slots, window_floor)
    _gather_window[(rows, slots // EACH)](
        window, *(each.contiguous() for each in ids), None if block_future is None else block_future.contiguous(),
        ring, keys, indices, base, window.stride(0), *ring.stride()[:2], window_len, ring.shape[1],
        slots, width, triton.next_power_of_2(width), EACH,
    )  # fmt: skip
    return keys, indices


def gather_latents(
    latent: Tensor, latent_scale: Tensor, page_table: Tensor, requests: Tensor, selected: Tensor
) -> tuple[Tensor, Tensor]:
    """The same of selected groups: uint8 [R, S, D/2 + D/16], int32 [R, 1, S]."""
    rows, chosen = selected.shape
    half, scales = latent.shape[2], latent_scale.shape[2]
    slots = -(-chosen // KEYS) * KEYS
    latent, latent_scale = (each if each.stride(2) == 1 else each.contiguous() for each in (latent, latent_scale))
    keys = torch.empty(rows, slots, half + scales, dtype=torch.uint8, device=latent.device)
    indices = torch.empty(rows, 1, slots, dtype=torch.int32, device=latent.device)
    _gather_latents[(rows, slots // EACH)](
        latent, latent_scale, page_table, requests.contiguous(), selected, keys, indices,
        *latent.stride()[:2], *latent_scale.stride()[:2], *page_table.stride(), *selected.stride(),
        latent.shape[1], chosen, slots, half, scales,
        triton.next_power_of_2(half), triton.next_power_of_2(scales), EACH,
    )  # fmt: skip
    return keys, indices


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
    if q.dtype == torch.float32 or size != CHANNELS or heads > HEADS[-1]:
        return triton_attention.sparse_attention(
            q, window, positions, fresh, row_slots, window_floor, ring, window_len,
            latent, latent_scale, page_table, requests, selected, sink, scale, block_future,
        )  # fmt: skip
    if not rows:
        return torch.empty_like(q)
    most = next(each for each in HEADS if each >= heads)
    if heads < most:
        q = torch.nn.functional.pad(q, (0, 0, 0, most - heads))
        sink = torch.nn.functional.pad(sink, (0, most - heads))
    out = torch.empty(rows, heads, size, dtype=q.dtype, device=q.device)
    for first in range(0, rows, MOST_ROWS):
        part = slice(first, first + MOST_ROWS)
        keys, indices = gather_window(
            window, first, positions[part], fresh[part], row_slots[part], window_floor[part], ring, window_len,
            None if block_future is None else block_future[part],
        )  # fmt: skip
        more, chosen = None, None
        if selected is not None and selected.shape[1]:
            assert latent is not None and latent_scale is not None and page_table is not None and requests is not None
            more, chosen = gather_latents(latent, latent_scale, page_table, requests[part], selected[part])
        out[part] = attend(q[part], keys, indices, more, chosen, sink, scale, batch_invariant=True)[:, :heads]
    return out
