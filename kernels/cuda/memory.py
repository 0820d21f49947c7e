"""Reads and writes of request state and pages: window rings, tails, n-grams, pages. One launch per op.

Tiles: a program is one row with all its channels (D = 512 is 16 channels a thread in one warp, 16-byte accesses), so a
row is cast and stored without leaving the registers and a batch of 64 to 256 rows is as many programs. ``ngram_write``
alone moves single numbers and takes 128 rows a program. Sizes that are not powers of two are masked; a masked channel
reads zero, and as D is a multiple of the block no block is cut.

A row that is not kept leaves at once: its ids are loaded but no address is made from them. Ids are int64 and stay so in
every product with a stride; pools are addressed by strides, of which Triton knows those that are 1 or multiples of 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import fp4_cast, fp8_cast, latent_cast, narrow, widen
from .overlap import OVERLAP, after_previous

_NGRAM_ROWS = 128


def _warps(channels: int) -> int:
    """Warps of a program that moves one row: 16 channels a thread."""
    return max(1, min(8, channels // 512))


# ---- window rings ---------------------------------------------------------------------------------------------------


@triton.jit
def _window_pack(kv, packed, kv_row, size: tl.constexpr, SIZE: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, SIZE)[None, :]
    block = tl.arange(0, SIZE // 32)[None, :]
    x = widen(tl.load(kv + row * kv_row + channel, mask=channel < size, other=0.0))
    values, scale = fp8_cast(x)
    out = packed + row * (size + size // 32)
    tl.store(out + channel, values, mask=channel < size)
    tl.store(out + size + block, scale.to(tl.uint8), mask=block < size // 32)


def window_pack(kv: Tensor) -> Tensor:
    rows, size = kv.shape
    packed = torch.empty(rows, size + size // 32, dtype=torch.uint8, device=kv.device)
    if rows:
        kv = kv if kv.stride(1) == 1 else kv.contiguous()
        width = triton.next_power_of_2(size)
        _window_pack[(rows,)](kv, packed, kv.stride(0), size, width, num_warps=_warps(width), **OVERLAP)
    return packed


@triton.jit
def _window_write(
    packed, row_slots, positions, keep, ring, tags,
    packed_row, ring_slot, ring_row, ring_byte, tags_slot, tags_row, length,
    width: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(keep + row):
        slot, position = tl.load(row_slots + row), tl.load(positions + row)
        at = position % length
        byte = tl.arange(0, WIDTH)
        x = tl.load(packed + row * packed_row + byte, mask=byte < width)
        tl.store(ring + slot * ring_slot + at * ring_row + byte * ring_byte, x, mask=byte < width)
        tl.store(tags + slot * tags_slot + at * tags_row, position.to(tl.int32))


def window_write(
    packed: Tensor, row_slots: Tensor, positions: Tensor, keep: Tensor, ring: Tensor, tags: Tensor
) -> None:
    rows, width = packed.shape
    if not rows:
        return
    packed = packed if packed.stride(1) == 1 else packed.contiguous()
    _window_write[(rows,)](
        packed, *_dense(row_slots, positions, keep), ring, tags,
        packed.stride(0), *ring.stride(), *tags.stride(), ring.shape[1],
        width, triton.next_power_of_2(width), num_warps=_warps(width),
        **OVERLAP,
    )  # fmt: skip


# ---- compressor pairs -----------------------------------------------------------------------------------------------


@triton.jit
def _compress_pair(
    value, score, positions, fresh, row_slots, tail, out,
    value_row, score_row, tail_slot, tail_row, tail_part, tail_channel, length,
    size: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    channel = tl.arange(0, SIZE)
    inside = channel < size
    dtype: tl.constexpr = out.dtype.element_ty
    pooled = tl.zeros((SIZE,), tl.float32)
    if position % 2 == 1:
        # The earlier token of the pair: the row before in this batch, or the tail.
        if tl.load(fresh + row) > 0:
            value0 = tl.load(value + (row - 1) * value_row + channel, mask=inside, other=0.0)
            score0 = tl.load(score + (row - 1) * score_row + channel, mask=inside, other=0.0)
        else:
            before = tail + tl.load(row_slots + row) * tail_slot + (position - 1) % length * tail_row
            value0 = tl.load(before + channel * tail_channel, mask=inside, other=0.0)
            score0 = tl.load(before + tail_part + channel * tail_channel, mask=inside, other=0.0)
        value1 = tl.load(value + row * value_row + channel, mask=inside, other=0.0)
        score1 = tl.load(score + row * score_row + channel, mask=inside, other=0.0)
        # float64 costs nothing here (the op waits for memory) and leaves one rounding. A maximum that drops a NaN is
        # harmless: the NaN comes back in its difference to it.
        score0, score1 = score0.to(tl.float64), score1.to(tl.float64)
        top = tl.maximum(score0, score1)
        weight0, weight1 = tl.exp(score0 - top), tl.exp(score1 - top)
        total = value0.to(tl.float64) * weight0 + value1.to(tl.float64) * weight1
        pooled = (total / (weight0 + weight1)).to(tl.float32)
    tl.store(out + row * size + channel, narrow(pooled, dtype), mask=inside)


def compress_pair(
    value: Tensor,
    score: Tensor,
    positions: Tensor,
    fresh: Tensor,
    row_slots: Tensor,
    tail: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    rows, size = value.shape
    out = torch.empty(rows, size, dtype=dtype, device=value.device)
    if rows:
        value, score = (x if x.stride(1) == 1 else x.contiguous() for x in (value, score))
        _compress_pair[(rows,)](
            value, score, *_dense(positions, fresh, row_slots), tail, out,
            value.stride(0), score.stride(0), *tail.stride(), tail.shape[1],
            size, triton.next_power_of_2(size), num_warps=4,
            **OVERLAP,
        )  # fmt: skip
    return out


@triton.jit
def _tail_write(
    value, score, positions, row_slots, keep, tail,
    value_row, score_row, tail_slot, tail_row, tail_part, tail_channel, length,
    size: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(keep + row):
        at = tl.load(positions + row) % length
        channel = tl.arange(0, SIZE)
        inside = channel < size
        place = tail + tl.load(row_slots + row) * tail_slot + at * tail_row + channel * tail_channel
        tl.store(place, tl.load(value + row * value_row + channel, mask=inside), mask=inside)
        tl.store(place + tail_part, tl.load(score + row * score_row + channel, mask=inside), mask=inside)


def tail_write(value: Tensor, score: Tensor, positions: Tensor, row_slots: Tensor, keep: Tensor, tail: Tensor) -> None:
    rows, size = value.shape
    if not rows:
        return
    value, score = (x if x.stride(1) == 1 else x.contiguous() for x in (value, score))
    _tail_write[(rows,)](
        value, score, *_dense(positions, row_slots, keep), tail,
        value.stride(0), score.stride(0), *tail.stride(), tail.shape[1],
        size, triton.next_power_of_2(size), num_warps=4,
        **OVERLAP,
    )  # fmt: skip


# ---- pages ----------------------------------------------------------------------------------------------------------


@triton.jit
def _page_write(
    x, values, scales, page_ids, groups, keep,
    x_row, values_page, values_group, values_byte, scales_page, scales_group, scales_byte,
    size: tl.constexpr, SIZE: tl.constexpr, LATENT: tl.constexpr,
):  # fmt: skip
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(keep + row):
        page, group = tl.load(page_ids + row), tl.load(groups + row)
        BLOCK: tl.constexpr = 16 if LATENT else 32
        channel = tl.arange(0, SIZE)[None, :]
        byte = tl.arange(0, SIZE // 2)[None, :]
        block = tl.arange(0, SIZE // BLOCK)[None, :]
        tile = widen(tl.load(x + row * x_row + channel, mask=channel < size, other=0.0))
        if LATENT:
            packed, scale = latent_cast(tile)
        else:
            packed, scale = fp4_cast(tile)
        values += page * values_page + group * values_group
        scales += page * scales_page + group * scales_group
        tl.store(values + byte * values_byte, packed, mask=byte < size // 2)
        tl.store(scales + block * scales_byte, scale.to(tl.uint8), mask=block < size // BLOCK)


def _write_pages(
    x: Tensor, values: Tensor, scales: Tensor, page_ids: Tensor, groups: Tensor, keep: Tensor, latent: bool
) -> None:
    rows, size = x.shape
    if not rows:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    width = triton.next_power_of_2(size)
    _page_write[(rows,)](
        x, values, scales, *_dense(page_ids, groups, keep),
        x.stride(0), *values.stride(), *scales.stride(),
        size, width, latent, num_warps=_warps(width),
        **OVERLAP,
    )  # fmt: skip


def latent_write(
    latent: Tensor, values: Tensor, scales: Tensor, page_ids: Tensor, groups: Tensor, keep: Tensor
) -> None:
    _write_pages(latent, values, scales, page_ids, groups, keep, True)


def index_key_write(
    key: Tensor, values: Tensor, scales: Tensor, page_ids: Tensor, groups: Tensor, keep: Tensor
) -> None:
    _write_pages(key, values, scales, page_ids, groups, keep, False)


# ---- n-grams --------------------------------------------------------------------------------------------------------


@triton.jit
def _ngram_write(
    token_classes, positions, row_slots, keep, ngrams, ngrams_slot, ngrams_place, length, rows, ROWS: tl.constexpr
):
    after_previous()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = tl.load(keep + row, mask=row < rows, other=0) != 0
    slot = tl.load(row_slots + row, mask=kept, other=0)
    at = tl.load(positions + row, mask=kept, other=0) % length
    tl.store(
        ngrams + slot * ngrams_slot + at * ngrams_place, tl.load(token_classes + row, mask=kept, other=0), mask=kept
    )


def ngram_write(token_classes: Tensor, positions: Tensor, row_slots: Tensor, keep: Tensor, ngrams: Tensor) -> None:
    rows = token_classes.shape[0]
    if not rows:
        return
    _ngram_write[(triton.cdiv(rows, _NGRAM_ROWS),)](
        *_dense(token_classes, positions, row_slots, keep), ngrams, *ngrams.stride(), ngrams.shape[1], rows,
        _NGRAM_ROWS, num_warps=4,
        **OVERLAP,
    )  # fmt: skip


def _dense(*vectors: Tensor) -> tuple[Tensor, ...]:
    """Vectors with a step of one; those that have it already are not copied."""
    return tuple(vector.contiguous() for vector in vectors)
