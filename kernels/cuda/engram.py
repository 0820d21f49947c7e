"""Engram: hashes of the last n-grams, rows of the hash table, and the gate into the residual streams.

engram_hash: a program is 16 rows; it walks back through their tokens once, and each step of the walk yields the hashes
of all heads of one n-gram size.

engram_gather: a program is up to 4096 channels of a row: 16 table rows of 256 bytes, from anywhere in 100 GB.

engram_gate: a program is one stream of a row. Stream, key and both norm weights are read once and stay in registers
until the gate is known; the value is read by all M programs of the row, from the cache but once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import e4m3_value, e8m0_value, narrow, widen
from .norm_rope import square_sum, to_narrow, to_wide, warps
from .overlap import OVERLAP, after_previous

BLOCK = 32  # channels per scale of a table row


@triton.jit(do_not_specialize=["rows"])
def _hash(
    token_classes,
    positions,
    fresh,
    row_slots,
    ngrams,
    multipliers,
    primes,
    offsets,
    out,
    rows,
    pad_class,
    slot_stride,
    place_stride,
    LENGTH: tl.constexpr,
    SIZES: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
):
    after_previous()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    head = tl.arange(0, HEADS_BLOCK)
    mask = live[:, None] & (head < HEADS)[None, :]
    position = tl.load(positions + row, mask=live, other=0)
    in_batch = tl.load(fresh + row, mask=live, other=0)
    slot = ngrams + tl.load(row_slots + row, mask=live, other=0) * slot_stride
    token = tl.load(token_classes + row, mask=live, other=-1)
    pad = tl.full((ROWS,), 0, tl.int64) + pad_class
    dead = token < 0
    rolling = tl.where(dead, pad, token) * tl.load(multipliers)
    for back in tl.static_range(1, SIZES + 1):
        dead = dead | (position < back)
        near = in_batch >= back
        place = (position - back) % LENGTH
        token = tl.load(token_classes + row - back, mask=live & near, other=-1)
        earlier = tl.load(slot + place * place_stride, mask=live & ~near & ~dead, other=-1)
        token = tl.where(near, token, earlier)
        dead = dead | (token < 0)
        rolling = rolling ^ (tl.where(dead, pad, token) * tl.load(multipliers + back))
        column = (back - 1) * HEADS + head
        prime = tl.load(primes + column, mask=head < HEADS, other=1)[None, :]
        bucket = rolling[:, None] % prime
        bucket = tl.where(bucket < 0, bucket + prime, bucket)  # the remainder has the sign of the hash
        bucket += tl.load(offsets + column, mask=head < HEADS, other=0)[None, :]
        tl.store(out + row.to(tl.int64)[:, None] * (SIZES * HEADS) + column[None, :], bucket, mask=mask)


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
    rows, (sizes, heads) = positions.shape[0], primes.shape
    out = torch.empty(rows, sizes * heads, dtype=torch.int64, device=positions.device)
    if not out.numel():
        return out
    tile = 16
    _hash[(triton.cdiv(rows, tile),)](
        token_classes.contiguous(),
        positions.contiguous(),
        fresh.contiguous(),
        row_slots.contiguous(),
        ngrams,
        multipliers.contiguous(),
        primes.contiguous(),
        offsets.contiguous(),
        out,
        rows,
        pad_class,
        *ngrams.stride(),
        ngrams.shape[1],
        sizes,
        heads,
        tile,
        triton.next_power_of_2(heads),
        **OVERLAP,
    )
    return out


@triton.jit
def _gather(
    rows,
    table,
    scale,
    out,
    table_stride,
    scale_stride,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    COLUMNS_BLOCK: tl.constexpr,
    SCALES_BLOCK: tl.constexpr,
):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS_BLOCK + tl.arange(0, COLUMNS_BLOCK)
    block = tl.arange(0, SCALES_BLOCK)
    blocks = (column < COLUMNS)[:, None] & (block < D // 32)[None, :]
    id = tl.load(rows + row * COLUMNS + column, mask=column < COLUMNS, other=0)[:, None]
    factor = e8m0_value(tl.load(scale + id * scale_stride + block[None, :], mask=blocks, other=127))
    channel = block[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    values = e4m3_value(tl.load(table + id[:, :, None] * table_stride + channel, mask=blocks[:, :, None], other=0))
    result = narrow(values * factor[:, :, None], out.dtype.element_ty)
    at = (row * COLUMNS + column)[:, None, None] * D + channel
    tl.store(out + at, result, mask=blocks[:, :, None])


def engram_gather(rows: Tensor, table: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    (count, columns), d = rows.shape, table.shape[1]
    out = torch.empty(count, columns * d, dtype=dtype, device=rows.device)
    if not out.numel():
        return out
    values, scales = table.view(torch.uint8), scale.view(torch.uint8)
    values = values if values.stride(1) == 1 else values.contiguous()
    scales = scales if scales.stride(1) == 1 else scales.contiguous()
    blocks = triton.next_power_of_2(d // BLOCK)
    tile = max(1, min(triton.next_power_of_2(columns), 4096 // (blocks * BLOCK)))
    _gather[(count, triton.cdiv(columns, tile))](
        rows.contiguous(), values, scales, out, values.stride(0), scales.stride(0), columns, d, tile, blocks, **OVERLAP
    )
    return out


@triton.jit
def _gate(
    streams,
    kv,
    q_weight,
    k_weight,
    live,
    out,
    H: tl.constexpr,
    M: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    after_previous()
    row, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, BLOCK)
    there = channel < H
    at = row * (M * H) + stream * H + channel
    given = tl.load(streams + at, mask=there, other=0.0)
    result = given
    if tl.load(live + row) != 0:
        x = to_wide(given)
        kv_at = kv + row * ((M + 1) * H) + channel
        key = to_wide(tl.load(kv_at + stream * H, mask=there, other=0.0))
        value = to_wide(tl.load(kv_at + M * H, mask=there, other=0.0))
        q = widen(tl.load(q_weight + stream * H + channel, mask=there, other=0.0))
        k = widen(tl.load(k_weight + stream * H + channel, mask=there, other=0.0))
        dot = tl.sum(x * (q * k) * key, axis=0).to(tl.float64)
        norm = tl.sqrt((square_sum(x) / H + EPS) * (square_sum(key) / H + EPS))
        match = dot / norm * (1.0 / H**0.5)
        root = tl.sqrt(tl.maximum(tl.abs(match), 1e-6))
        root = tl.where(match != match, match, tl.where(match < 0, -root, root))
        gate = 1.0 / (1.0 + tl.exp(-root))
        result = to_narrow(x + gate.to(x.dtype) * value, out.dtype.element_ty)
    tl.store(out + at, result, mask=there)


def engram_gate(streams: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, live: Tensor) -> Tensor:
    rows, m, h = streams.shape
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    if rows:
        block = triton.next_power_of_2(h)
        _gate[(rows, m)](
            streams.contiguous(),
            kv.contiguous(),
            q_weight.contiguous(),
            k_weight.contiguous(),
            live.contiguous(),
            out,
            h,
            m,
            eps,
            block,
            num_warps=warps(block),
            **OVERLAP,
        )
    return out
