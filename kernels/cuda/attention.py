"""Attention over window keys and selected compressed groups in one softmax, one launch for decode, verify and prefill.

Tiles: a program is one row and up to 64 heads, so a row's keys are read and unpacked once for all of them (released
shape: 64 heads x 512 channels, one program a row, 8 warps). It reads 64 keys at a time, which is the contract's softmax
block: the running maximum of the contract *is* the running maximum of the loop. Per block:

    words, gathered one block ahead  ->  keys bf16 [64, D]  ->  S = q keys^T  ->  P  ->  out += P keys

Keys are exact in bf16. A thread unpacks 16 bytes of a row in registers, a few instructions for eight channels, and
stores them to shared memory, where the two products read them as keys and as values. Channels lie there in another
order (``_deal``), so that these stores do not collide; q is loaded in that order, the result is put back at the end.

Shared memory at the released shape: q 64 KiB, keys 64 KiB, P 8 KiB. The accumulators are 64 x 512 float32, 128
registers a thread; what spills are the addresses of tiles that the tensor cores are given, which do not change. Keys
are never split over programs: another order of maxima would be another result. Blocks without any key are skipped,
which changes nothing (the maximum stays, the sums gain zeros).

float32 rows, which are for debugging, take a program a head and sums in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import INTERPRET, e2m1_value, e4m3_value, e8m0_value, narrow, to_bfloat16, widen
from .overlap import OVERLAP, after_previous

_EMPTY_MAX = tl.constexpr(-1e30)  # running maximum before any key
_KEYS = tl.constexpr(64)  # keys of a softmax block


# ---- bytes to keys ---------------------------------------------------------------------------------------------------


@triton.jit
def _words(place, COUNT: tl.constexpr, count: tl.constexpr, byte_step, present, ALIGN: tl.constexpr):
    """4 * count bytes from each of the addresses ``place`` [K, 1] on, as int32 [K, COUNT]; zero where not ``present``.

    Bytes travel as words because the compiler would keep every byte in a register of its own.
    """
    word = tl.arange(0, COUNT)[None, :]
    mask = present & (word < count)
    if ALIGN >= 4:
        # Past L1, where the ids of the next blocks should stay: nothing here is read twice.
        place = place.to(tl.pointer_type(tl.int32), bitcast=True)
        words = tl.load(place + word, mask=mask, other=0, cache_modifier=".cg")
    else:
        words = tl.load(place + word * 4 * byte_step, mask=mask, other=0).to(tl.int32)
        words |= tl.load(place + (word * 4 + 1) * byte_step, mask=mask, other=0).to(tl.int32) << 8
        words |= tl.load(place + (word * 4 + 2) * byte_step, mask=mask, other=0).to(tl.int32) << 16
        words |= tl.load(place + (word * 4 + 3) * byte_step, mask=mask, other=0).to(tl.int32) << 24
    return words


@triton.jit
def _spread(scale, COLUMNS: tl.constexpr):
    """[K, n] -> [K, COLUMNS]: every scale for the run of columns it belongs to."""
    RUN: tl.constexpr = COLUMNS // scale.shape[1]
    runs = tl.broadcast_to(scale[:, :, None], (scale.shape[0], scale.shape[1], RUN))
    return tl.reshape(runs, (scale.shape[0], COLUMNS))


@triton.jit
def _bf16_twice(x):
    """float32 that bfloat16 holds -> its bfloat16 in both halves of an int32."""
    bits = x.to(tl.uint32, bitcast=True)
    return (bits | (bits >> 16)).to(tl.int32, bitcast=True)


@triton.jit
def _halves(pair):
    """The two bfloat16 in an int32."""
    return tl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
    )


@triton.jit
def _four(x0, x1, x2, x3):
    """Four [K, C] -> [K, 4C], one channel of each in turn."""
    four = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    return tl.reshape(four, (x0.shape[0], 4 * x0.shape[1]))


@triton.jit
def _e2m1_pairs(word, scale):
    """Eight nibbles in an int32 and a scale twice, both [K, C] -> four pairs of scaled bfloat16, low nibbles first.

    A nibble's magnitude selects the high and the low byte of its bfloat16 from two tables of eight bytes each.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, m, n, h, l, s;
        shl.b32 x, $4, 4;
        and.b32 m, $4, 0x77777777;
        prmt.b32 h, 0x3F3F3F00, 0x40404040, m;  // nibbles 0 to 3
        prmt.b32 l, 0xC0800000, 0xC0804000, m;
        prmt.b32 s, $4, x, 0x1504;              // their signs, each in the bit 7 of a byte
        lop3.b32 h, h, s, 0x80808080, 0xF8;     // h | (s & mask)
        prmt.b32 n, l, h, 0x5140;
        mul.rn.bf16x2 $0, n, $5;
        prmt.b32 n, l, h, 0x7362;
        mul.rn.bf16x2 $1, n, $5;
        shr.u32 m, m, 16;                       // nibbles 4 to 7
        prmt.b32 h, 0x3F3F3F00, 0x40404040, m;
        prmt.b32 l, 0xC0800000, 0xC0804000, m;
        prmt.b32 s, $4, x, 0x3726;
        lop3.b32 h, h, s, 0x80808080, 0xF8;
        prmt.b32 n, l, h, 0x5140;
        mul.rn.bf16x2 $2, n, $5;
        prmt.b32 n, l, h, 0x7362;
        mul.rn.bf16x2 $3, n, $5;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r",
        [word, scale],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _e4m3_pairs(word, scale):
    """Four e4m3 in an int32 and a scale twice, both [K, C] -> two pairs of scaled bfloat16. A NaN is NaN.

    Sign, exponent and significand go where bfloat16 has them; that gives the value times 2^-120.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, m, n, unit;
        mov.b32 unit, 0x7B807B80;     // 2^120, twice
        prmt.b32 x, $2, 0, 0x4140;    // bytes 0 and 1, each in a half
        shl.b32 m, x, 4;
        and.b32 m, m, 0x07F007F0;
        add.u32 n, m, 0x00100010;     // carries into bit 11 from all ones, the NaN of e4m3
        and.b32 n, n, 0x08000800;
        shl.b32 x, x, 8;
        lop3.b32 m, m, x, 0x80008000, 0xF8;
        mul.rn.bf16x2 m, m, unit;
        mul.rn.bf16x2 m, m, $3;
        shl.b32 x, n, 4;
        shr.u32 n, n, 6;
        sub.u32 n, x, n;              // 0x7FE0 in a half that is NaN
        or.b32 $0, m, n;
        prmt.b32 x, $2, 0, 0x4342;    // bytes 2 and 3
        shl.b32 m, x, 4;
        and.b32 m, m, 0x07F007F0;
        add.u32 n, m, 0x00100010;
        and.b32 n, n, 0x08000800;
        shl.b32 x, x, 8;
        lop3.b32 m, m, x, 0x80008000, 0xF8;
        mul.rn.bf16x2 m, m, unit;
        mul.rn.bf16x2 m, m, $3;
        shl.b32 x, n, 4;
        shr.u32 n, n, 6;
        sub.u32 n, x, n;
        or.b32 $1, m, n;
        }
        """,
        "=&r,=&r,r,r",
        [word, scale],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _latent_keys(word, scale, WIDE: tl.constexpr):
    """Words [K, D/8] and E4M3 scale bytes [K, D/16] of latents -> keys [K, D], float32 if WIDE, else bfloat16."""
    C: tl.constexpr = word.shape[1]
    factor = e4m3_value(scale)
    if WIDE:
        factor = _spread(factor, C)
        x0, x1 = e2m1_value(word) * factor, e2m1_value(word >> 4) * factor
        x2, x3 = e2m1_value(word >> 8) * factor, e2m1_value(word >> 12) * factor
        x4, x5 = e2m1_value(word >> 16) * factor, e2m1_value(word >> 20) * factor
        x6, x7 = e2m1_value(word >> 24) * factor, e2m1_value(word >> 28) * factor
    else:
        pair0, pair1, pair2, pair3 = _e2m1_pairs(word, _spread(_bf16_twice(factor), C))
        x0, x1 = _halves(pair0)
        x2, x3 = _halves(pair1)
        x4, x5 = _halves(pair2)
        x6, x7 = _halves(pair3)
    even = tl.join(tl.join(x0, x4), tl.join(x2, x6))
    odd = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    return _deal(tl.reshape(tl.join(even, odd), (word.shape[0], 8 * C)))


@triton.jit
def _window_keys(word, scale, WIDE: tl.constexpr):
    """Words [K, D/4] and UE8M0 bytes [K, D/32] of window rows -> keys [K, D], float32 if WIDE, else bfloat16."""
    C: tl.constexpr = word.shape[1]
    factor = e8m0_value(scale)
    if WIDE:
        factor = _spread(factor, C)
        x0, x1 = e4m3_value(word.to(tl.uint8)) * factor, e4m3_value((word >> 8).to(tl.uint8)) * factor
        x2, x3 = e4m3_value((word >> 16).to(tl.uint8)) * factor, e4m3_value((word >> 24).to(tl.uint8)) * factor
    else:
        pair0, pair1 = _e4m3_pairs(word, _spread(_bf16_twice(factor), C))
        x0, x1 = _halves(pair0)
        x2, x3 = _halves(pair1)
    return _deal(tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (word.shape[0], 4 * C)))


@triton.jit
def _exp(x):
    """e^x of a difference to a maximum. float32 flushes to zero below 2^-126, which saves handling subnormals."""
    return tl.exp(x) if x.dtype == tl.float64 else tl.exp2(x * 1.4426950408889634)


@triton.jit
def _deal(x):
    """[K, D] in channel order -> the order of the tiles: runs of 8 channels, every fourth run first.

    The runs of 8 that a thread unpacked next to each other go to different banks, and those of neighbouring threads
    next to each other, so the stores of a tile to shared memory do not collide.
    """
    runs = tl.reshape(x, (x.shape[0], x.shape[1] // 32, 4, 8))
    return tl.reshape(tl.permute(runs, (0, 2, 1, 3)), (x.shape[0], x.shape[1]))


@triton.jit
def _gather(x):
    """The inverse of ``_deal``."""
    runs = tl.reshape(x, (x.shape[0], 4, x.shape[1] // 32, 8))
    return tl.reshape(tl.permute(runs, (0, 2, 1, 3)), (x.shape[0], x.shape[1]))


# ---- the kernel ------------------------------------------------------------------------------------------------------


@triton.jit
def _attend(queries, keys, present, once, scale, top, total, out, EXACT: tl.constexpr):
    """One block of keys [64, D] into the running maximum [H], the running sum [H] and the result [H, D].

    The first product stands in a loop of one round (``once`` > 0, unknown to the compiler) because two products in a
    chain are laid out as in dense attention, where a warp has whole rows: with 64 rows for two warp groups, each would
    compute all logits. A product that seems to stand alone is shared out.

    ``EXACT``: float64 sums over one head instead, everything else in float64 too.
    """
    if EXACT:
        keys = keys.to(tl.float64)
        logits = (tl.sum(queries * keys, axis=1) * scale).to(tl.float32).to(tl.float64)[None, :]
    else:
        dots = tl.zeros((queries.shape[0], keys.shape[0]), tl.float32)
        for _ in tl.range(0, once, once, num_stages=1):
            dots = tl.dot(queries, tl.trans(keys), dots)
        logits = dots * scale
    logits = tl.where(present[None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, axis=1))
    p = _exp(logits - new_top[:, None])
    shrink = _exp(top - new_top)
    total = total * shrink + tl.sum(p, axis=1)
    out *= shrink[:, None]
    if EXACT:
        out += tl.sum(tl.trans(p.to(tl.float32).to(tl.float64)) * keys, axis=0)[None, :]
    elif INTERPRET:
        out = tl.dot(widen(to_bfloat16(p)), keys, out)
    else:
        out = tl.dot(p.to(tl.bfloat16), keys, out)
    return new_top, total, out


@triton.jit
def _window_block(
    start, lowest, count, ready, first, batch, window_row, own_ring, ring_row, ring_byte,
    ring_len: tl.constexpr, size: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Words [64, D/4] and scale bytes [64, D/32] of the window slots from ``start`` on; zero where absent."""
    slot = start + tl.arange(0, _KEYS)
    present = ((slot >= lowest) & (slot < count))[:, None]
    here = slot >= ready
    at_ring = ((first + start) % ring_len).to(tl.int32) + tl.arange(0, _KEYS)
    # Distances in units of ALIGN bytes: the compiler forgets alignment in a choice, of pointers or of distances.
    distance = (own_ring.to(tl.int64) - batch.to(tl.int64)) // ALIGN
    row = tl.where(here, slot, at_ring % ring_len).to(tl.int64)
    place = tl.where(here, row * (window_row // ALIGN), distance + row * (ring_row // ALIGN)) * ALIGN
    place = batch + place[:, None]
    step = tl.where(here, 1, ring_byte)[:, None]
    block = tl.arange(0, D // 32)[None, :]
    words = _words(place, D // 4, size // 4, step, present, ALIGN)
    scale = tl.load(place + (size + block) * step, mask=present & (block < size // 32), other=0)
    return words, scale


@triton.jit
def _chosen(start, selected, selected_place, chosen: tl.constexpr):
    """The selected places from ``start`` on, int32 [64]; -1 where absent."""
    place = tl.arange(0, _KEYS)
    selected += start * selected_place
    return tl.load(selected + place * selected_place, mask=place < chosen - start, other=-1).to(tl.int32)


@triton.jit
def _selected_groups(
    start, selected, selected_place, page_table, table_page, groups: tl.constexpr, chosen: tl.constexpr
):
    """The selected groups from place ``start`` on, int32 [64]: page * groups + place in it, or -1.

    A number of a group in the whole pool fits: 2^31 groups of 288 bytes are more than any memory.
    """
    group = _chosen(start, selected, selected_place, chosen)
    page = tl.load(page_table + (group // groups).to(tl.int64) * table_page, mask=group >= 0, other=0)
    return tl.where(group >= 0, page.to(tl.int32) * groups + group % groups, -1)


@triton.jit
def _latent_block(
    group, latent, latent_scale,
    latent_page, latent_group, latent_byte, scale_page, scale_group, scale_byte,
    groups: tl.constexpr, size: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Words [64, D/8] and scale bytes [64, D/16] of the groups of ``_selected_groups``; zero where absent."""
    present = (group >= 0)[:, None]
    page, row = (group // groups).to(tl.int64), (group % groups).to(tl.int64)
    latent_at = (latent + page * latent_page + row * latent_group)[:, None]
    scale_at = (latent_scale + page * scale_page + row * scale_group)[:, None]
    words = _words(latent_at, D // 8, size // 8, latent_byte, present, ALIGN)
    block = tl.arange(0, D // 16)[None, :]
    return words, tl.load(scale_at + block * scale_byte, mask=present & (block < size // 16), other=0)


@triton.jit
def _sparse_attention(
    q, window, positions, fresh, row_slots, window_floor, ring,
    latent, latent_scale, page_table, requests, selected, sink, block_future, out,
    window_row, ring_slot, ring_row, ring_byte,
    latent_page, latent_group, latent_byte, scale_page, scale_group, scale_byte,
    table_row, table_page, selected_row, selected_place,
    scale, window_len,
    ring_len: tl.constexpr, heads: tl.constexpr, size: tl.constexpr, groups: tl.constexpr, chosen: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, CHOSEN: tl.constexpr,
    ALIGN: tl.constexpr, LATENT_ALIGN: tl.constexpr,
):  # fmt: skip
    """``HEADS``: heads of a tile; ``D`` and ``CHOSEN``: channels and selected places, as powers of two."""
    after_previous()
    dtype: tl.constexpr = q.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    WIDE: tl.constexpr = INTERPRET or EXACT
    state: tl.constexpr = tl.float64 if EXACT else tl.float32
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, D)
    run = channel // 8
    dealt = (run % (D // 32) * 4 + run // (D // 32)) * 8 + channel % 8  # the channels in the order of ``_deal``
    at = (row * heads + head[:, None]) * size
    real = head[:, None] < heads
    queries = tl.load(q + at + dealt[None, :], mask=real & (dealt[None, :] < size), other=0.0)
    if EXACT:
        queries = queries.to(tl.float64)
    elif INTERPRET:
        queries = widen(queries)

    top = tl.full((HEADS,), _EMPTY_MAX, state)
    total = tl.zeros((HEADS,), state)
    result = tl.zeros((HEADS, D), state)

    if selected is not None:
        # Ids, pages and latents are loads that wait for each other: they start here and arrive behind the window.
        place = tl.arange(0, CHOSEN)
        selected += row * selected_row
        ids = tl.load(selected + place * selected_place, mask=place < chosen, other=-1)
        used = tl.max(tl.where(ids >= 0, place + 1, 0), axis=0)
        page_table += tl.load(requests + row) * table_row
        group = _selected_groups(0, selected, selected_place, page_table, table_page, groups, chosen)
        latent_words, latent_scales = _latent_block(
            group, latent, latent_scale, latent_page, latent_group, latent_byte,
            scale_page, scale_group, scale_byte, groups, size, D, LATENT_ALIGN,
        )  # fmt: skip
        group = _selected_groups(_KEYS, selected, selected_place, page_table, table_page, groups, chosen)

    # Window: slot i of the row holds position first + i; the batch holds the slots from ``ready`` on.
    position, floor = tl.load(positions + row), tl.load(window_floor + row)
    if block_future is None:
        first, last = position - window_len + 1, position
    else:
        first, last = floor, position + tl.load(block_future + row)
    count = tl.maximum(last - first + 1, 0).to(tl.int32)
    lowest = tl.minimum(tl.maximum(tl.maximum(first, floor), 0) - first, count).to(tl.int32)
    ready = tl.minimum(tl.maximum(position - first - tl.load(fresh + row), 0), count).to(tl.int32)
    batch = window + (row - (position - first)) * window_row
    own_ring = ring + tl.load(row_slots + row) * ring_slot
    begin = lowest // _KEYS * _KEYS
    # Here and below the words of the next block are on their way while this one is multiplied.
    words, scales = _window_block(
        begin, lowest, count, ready, first, batch, window_row, own_ring, ring_row, ring_byte,
        ring_len, size, D, ALIGN,
    )  # fmt: skip
    for start in tl.range(begin, count, _KEYS, num_stages=1):
        keys = _window_keys(words, scales, WIDE)
        words, scales = _window_block(
            start + _KEYS, lowest, count, ready, first, batch, window_row, own_ring, ring_row, ring_byte,
            ring_len, size, D, ALIGN,
        )  # fmt: skip
        slot = start + tl.arange(0, _KEYS)
        present = (slot >= lowest) & (slot < count)
        top, total, result = _attend(queries, keys, present, window_len, scale, top, total, result, EXACT)

    if selected is not None:
        for start in tl.range(0, used, _KEYS, num_stages=1):
            keys = _latent_keys(latent_words, latent_scales, WIDE)
            latent_words, latent_scales = _latent_block(
                group, latent, latent_scale, latent_page, latent_group, latent_byte,
                scale_page, scale_group, scale_byte, groups, size, D, LATENT_ALIGN,
            )  # fmt: skip
            group = _selected_groups(
                start + 2 * _KEYS, selected, selected_place, page_table, table_page, groups, chosen
            )
            present = _chosen(start, selected, selected_place, chosen) >= 0
            top, total, result = _attend(queries, keys, present, window_len, scale, top, total, result, EXACT)

    # The sink is a key without a value. It may be far above every logit, so both are taken relative to the larger.
    drain = tl.load(sink + head, mask=head < heads, other=0.0).to(state)
    highest = tl.maximum(top, drain)
    shrink = _exp(top - highest)
    total = total * shrink + tl.where(drain >= top, 1.0, _exp(drain - highest))
    share = tl.where(total == 0, 0.0, shrink / total)
    result = _gather(narrow((result * share[:, None]).to(tl.float32), dtype))
    tl.store(out + at + channel[None, :], result, mask=real & (channel[None, :] < size))


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
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    window = window if window.stride(1) == 1 else window.contiguous()
    tile = 1 if q.dtype == torch.float32 else min(64, max(16, triton.next_power_of_2(heads)))
    align = _alignment(ring.stride(2), window.data_ptr(), window.stride(0), ring.data_ptr(), *ring.stride()[:2])
    strides: tuple[int, ...] = (0,) * 10
    groups, chosen, latent_align = 1, 0, 1
    if selected is not None:
        assert latent is not None and latent_scale is not None and page_table is not None
        strides = (*latent.stride(), *latent_scale.stride(), *page_table.stride(), *selected.stride())
        groups, chosen = latent.shape[1], selected.shape[1]
        latent_align = _alignment(latent.stride(2), latent.data_ptr(), *latent.stride()[:2])
    _sparse_attention[(rows, triton.cdiv(heads, tile))](
        q.contiguous(), window, *_dense(positions, fresh, row_slots, window_floor), ring,
        latent, latent_scale, page_table, *_dense(requests), selected, *_dense(sink, block_future), out,
        window.stride(0), *ring.stride(), *strides,
        scale, window_len,
        ring.shape[1], heads, size, groups, chosen,
        tile, triton.next_power_of_2(size), triton.next_power_of_2(max(1, chosen)),
        align, latent_align,
        num_warps=8,
        **OVERLAP,
    )  # fmt: skip
    return out


def _dense(*vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Vectors with a step of one; those that have it already are not copied."""
    return tuple(None if vector is None else vector.contiguous() for vector in vectors)


def _alignment(byte_step: int, *places: int) -> int:
    """The largest of 16, 4 and 1 that divides addresses and strides of runs of bytes; 1 if they are not runs."""
    for align in (16, 4):
        if byte_step == 1 and all(place % align == 0 for place in places):
            return align
    return 1
