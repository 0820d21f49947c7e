"""sparse_attention on the cube: 64 keys at a time are gathered and widened on the vector units, each of the two units
half of them, then multiplied with all heads; a unit has the softmax of half of the heads and their sums.

The sums of 64 heads, 512 channels each, fill the cube's accumulators by half and would overflow a unit's buffer beside
the keys, so they come from the cube some channels at a time and are rescaled where they stay, in the vector units.
Keys are narrow formats that bf16 holds exactly. Keys that are absent are zero, whatever lies where they would be.
"""

from __future__ import annotations

from math import gcd

import tilelang
import tilelang.ascend.language as T
import torch
from tilelang.layout import make_ascend_compact_nz_layout
from torch import Tensor

from ...reference.attention import EMPTY_MAX, SOFTMAX_BLOCK
from .. import soc
from . import bits

KEYS = SOFTMAX_BLOCK
HALF = KEYS // 2  # of a vector unit
DEPTH = 128  # channels of a product with the query, so that two of its operands fit their buffers
LANES = 8  # of a vector unit for the softmax of a head


@T.macro
def widen_window(packed, wide, there, first, low, high, half, D, threads):
    """bf16 values of this unit's keys: ``packed`` int32 [HALF, ...] four e4m3 bytes a word, then four UE8M0 scales a
    word. ``there`` int32 [KEYS]: whether key ``first + j`` is one of ``low .. high``."""
    with T.SimtVF(threads=threads):
        for k, w in T.Parallel(HALF, D // 4):
            word = T.alloc_var(T.int32)
            factor = T.alloc_var(T.float32)
            word = packed[k, w]
            # Eight words share a scale.
            factor = bits.e8m0_value(T.bitwise_and(T.shift_right(packed[k, D // 4 + w // 32], 8 * (w // 8 % 4)), 255))
            for i in T.serial(4):
                value = bits.e4m3_value(T.bitwise_and(T.shift_right(word, 8 * i), 255)) * factor
                present = first + half + k >= low and first + half + k <= high
                wide[k, w * 4 + i] = T.cast(T.if_then_else(present, value, T.float32(0.0)), "bfloat16")
        for j in T.Parallel(KEYS):
            there[j] = T.if_then_else(first + j >= low and first + j <= high, 1, 0)


@T.macro
def widen_latents(codes, scales, chosen, wide, there, left, half, D, threads):
    """The same of latents: ``codes`` int32 [HALF, D/8] eight e2m1 codes a word, ``scales`` int32 [HALF, D/64] four e4m3
    scales a word; ``chosen`` int64 [KEYS] groups, of which the first ``left`` may be there."""
    with T.SimtVF(threads=threads):
        for k, w in T.Parallel(HALF, D // 8):
            word = T.alloc_var(T.int32)
            factor = T.alloc_var(T.float32)
            word = codes[k, w]
            # Two words share a scale.
            factor = bits.e4m3_value(T.bitwise_and(T.shift_right(scales[k, w // 8], 8 * (w // 2 % 4)), 255))
            for i in T.serial(8):
                value = bits.e2m1_value(T.bitwise_and(T.shift_right(word, 4 * i), 15)) * factor
                present = half + k < left and chosen[half + k] >= 0
                wide[k, w * 8 + i] = T.cast(T.if_then_else(present, value, T.float32(0.0)), "bfloat16")
        for j in T.Parallel(KEYS):
            there[j] = T.if_then_else(j < left and chosen[j] >= 0, 1, 0)


@T.macro
def probabilities(dot, there, p, top, total, rescale, most, part, scale, heads, threads):
    """p bf16 of this unit's heads, from products float32 [heads, KEYS]: relative to ``top``, the largest logit so far,
    which moves, as does the ``total`` of p before it was rounded. ``rescale``: of what was summed before."""
    with T.SimtVF(threads=threads):
        for n in T.Parallel(threads):
            high = T.alloc_var(T.float32)
            high = T.float32(EMPTY_MAX)
            for j in T.serial(KEYS // LANES):
                logit = dot[n // LANES, n % LANES + LANES * j] * T.float32(scale)
                high = T.if_then_else(there[n % LANES + LANES * j] != 0, T.max(high, logit), high)
            most[n] = high
        for n in T.Parallel(threads):
            high = T.alloc_var(T.float32)
            chance = T.alloc_var(T.float32)
            total_part = T.alloc_var(T.float32)
            high = top[n // LANES]
            for j in T.serial(LANES):
                high = T.max(high, most[n // LANES * LANES + j])
            total_part = T.float32(0.0)
            for j in T.serial(KEYS // LANES):
                # NaN, if the logit is: then so are total and result.
                chance = T.exp(dot[n // LANES, n % LANES + LANES * j] * T.float32(scale) - high)
                chance = T.if_then_else(there[n % LANES + LANES * j] != 0, chance, T.float32(0.0))
                total_part = total_part + chance
                p[n // LANES, n % LANES + LANES * j] = T.cast(chance, "bfloat16")
            part[n] = total_part
        for h in T.Parallel(heads):
            high = T.alloc_var(T.float32)
            total_part = T.alloc_var(T.float32)
            high = top[h]
            total_part = T.float32(0.0)
            for j in T.serial(LANES):
                high = T.max(high, most[h * LANES + j])
                total_part = total_part + part[h * LANES + j]
            rescale[h] = T.exp(top[h] - high)
            total[h] = total[h] * rescale[h] + total_part
            top[h] = high


@tilelang.jit(target="ascend", pass_configs=bits.APART)
def attended(
    Q,
    W,
    ring,
    V,
    S,
    table,
    request,
    selected,
    reach,
    position,
    first,
    last,
    floor,
    fresh,
    slot,
    sink,
    Y,
    scale: float = 1.0,
    columns: int = 128,
    cores: int = 32,
):
    """Q bf16 [R, H, D], W int32 [R, D/4 + D/128] and ring int32 [slots, L, D/4 + D/128] packed window keys, V int32
    [pages, G, D/8] and S int32 [pages, G, D/64] packed latents, ring, V and S strided, table int64 [B, P], request
    int64 [R], selected int64 [R, K] and reach int32 [R], how many of them to look at; int64 [R]: position, the first
    and last position of the window, floor, fresh and slot; sink float32 [H] -> Y bf16 [R, H, D].

    H a multiple of 32, D of 128 and ``columns``, the channels of the sums that a vector unit takes at a time.
    """
    R, N, M, B, P, K = T.dynamic("R, N, M, B, P, K")
    H, D, L, G = T.const("H, D, L, G")
    w0, w1, v0, v1, s0, s1 = T.dynamic("w0, w1, v0, v1, s0, s1", "int64")
    words, heads, threads = D // 4 + D // 128, H // 2, H // 2 * LANES
    Q: T.Tensor((R, H, D), T.bfloat16)
    W: T.Tensor((R, D // 4 + D // 128), T.int32)
    ring: T.StridedTensor((N, L, D // 4 + D // 128), (w0, w1, 1), T.int32)
    V: T.StridedTensor((M, G, D // 8), (v0, v1, 1), T.int32)
    S: T.StridedTensor((M, G, D // 64), (s0, s1, 1), T.int32)
    table: T.Tensor((B, P), T.int64)
    request: T.Tensor((R,), T.int64)
    selected: T.Tensor((R, K), T.int64)
    reach: T.Tensor((R,), T.int32)
    position: T.Tensor((R,), T.int64)
    first: T.Tensor((R,), T.int64)
    last: T.Tensor((R,), T.int64)
    floor: T.Tensor((R,), T.int64)
    fresh: T.Tensor((R,), T.int64)
    slot: T.Tensor((R,), T.int64)
    sink: T.Tensor((H,), T.float32)
    Y: T.Tensor((R, H, D), T.bfloat16)
    with T.MixedKernel(cores) as (core, unit):
        query = T.alloc_l1((H, D), T.bfloat16)
        keys = T.alloc_l1((KEYS, D), T.bfloat16)
        chances = T.alloc_l1((H, KEYS), T.bfloat16)
        query_part = T.alloc_l0a((H, DEPTH), T.bfloat16)
        keys_part = T.alloc_l0b((KEYS, DEPTH), T.bfloat16)
        dots = T.alloc_l0c((H, KEYS), T.float32)
        chances_part = T.alloc_l0a((H, KEYS), T.bfloat16)
        values_part = T.alloc_l0b((KEYS, columns), T.bfloat16)
        sums = T.alloc_l0c((H, columns), T.float32)
        packed = T.alloc_shared((HALF, (words + 7) // 8 * 8), T.int32)  # transfers start at multiples of 32 bytes
        codes = T.alloc_shared((HALF, D // 8), T.int32)
        scales = T.alloc_shared((HALF, max(8, D // 64)), T.int32)
        chosen = T.alloc_shared((KEYS,), T.int64)
        there = T.alloc_shared((KEYS,), T.int32)
        # Written in the cube's layout, whose columns of 16 channels stand one row apart.
        wide = T.alloc_shared((HALF + 1, D), T.bfloat16)
        p = T.alloc_shared((heads + 1, KEYS), T.bfloat16)
        T.annotate_layout({wide: make_ascend_compact_nz_layout(wide), p: make_ascend_compact_nz_layout(p)})
        # Twice: the next keys are on their way while these are read.
        T.annotate_buffer_versions({packed: 2, codes: 2, scales: 2, chosen: 2})
        dot = T.alloc_shared((heads, KEYS), T.float32)
        arrived = T.alloc_shared((heads, columns), T.float32)
        acc = T.alloc_shared((heads, D), T.float32)
        y = T.alloc_shared((heads, D), T.bfloat16)
        top = T.alloc_shared((heads,), T.float32)
        total = T.alloc_shared((heads,), T.float32)
        rescale = T.alloc_shared((heads,), T.float32)
        most = T.alloc_shared((threads,), T.float32)
        part = T.alloc_shared((threads,), T.float32)
        sinks = T.alloc_shared((heads,), T.float32)
        T.dual_copy(sink, sinks)
        for r in T.Persistent([R], cores, core):
            T.copy(Q[r, :, :], query)
            with T.SimtVF(threads=threads):
                for h, d in T.Parallel(heads, D):
                    acc[h, d] = T.float32(0.0)
                for h in T.Parallel(heads):
                    top[h] = T.float32(EMPTY_MAX)
                    total[h] = T.float32(0.0)
            begin = first[r]
            low = T.max(T.max(begin, floor[r]), 0) - begin
            high = last[r] - begin
            window_blocks = T.cast((high + KEYS) // KEYS, "int32")
            count = reach[r]
            for n in T.Pipelined(window_blocks + T.ceildiv(count, KEYS), num_stages=2):
                if n < window_blocks:
                    for k in T.serial(HALF):
                        at = n * KEYS + unit * HALF + k
                        if at >= low and at <= high:
                            place = begin + at
                            back = position[r] - place
                            if back <= fresh[r]:
                                T.copy(W[r - back, :], packed[k, 0:words])
                            else:
                                T.copy(ring[slot[r], place % L, :], packed[k, 0:words])
                    widen_window(packed, wide, there, n * KEYS, low, high, unit * HALF, D, threads)
                else:
                    start = (n - window_blocks) * KEYS
                    T.copy(selected[r, start : start + KEYS], chosen)
                    for k in T.serial(HALF):
                        if start + unit * HALF + k < count:
                            group = chosen[unit * HALF + k]
                            if group >= 0:
                                page = table[request[r], group // G]
                                T.copy(V[page, group % G, :], codes[k, :])
                                T.copy(S[page, group % G, :], scales[k, 0 : D // 64])
                    widen_latents(codes, scales, chosen, wide, there, count - start, unit * HALF, D, threads)
                T.dual_copy(wide[0:HALF, :], keys)
                for c in T.serial(D // DEPTH):
                    T.copy(query[:, c * DEPTH : (c + 1) * DEPTH], query_part)
                    T.copy(keys[:, c * DEPTH : (c + 1) * DEPTH], keys_part)
                    T.gemm(query_part, keys_part, dots, transpose_B=True, clear_accum=(c == 0))
                T.dual_copy(dots, dot)
                probabilities(dot, there, p, top, total, rescale, most, part, scale, heads, threads)
                T.dual_copy(p[0:heads, :], chances)
                T.copy(chances, chances_part)
                for c in T.serial(D // columns):
                    T.copy(keys[:, c * columns : (c + 1) * columns], values_part)
                    T.gemm(chances_part, values_part, sums, transpose_B=False, clear_accum=True)
                    T.dual_copy(sums, arrived)
                    with T.SimtVF(threads=threads):
                        for h, d in T.Parallel(heads, columns):
                            acc[h, c * columns + d] = acc[h, c * columns + d] * rescale[h] + arrived[h, d]
            with T.SimtVF(threads=threads):
                for h in T.Parallel(heads):
                    whole = total[h] + T.exp(sinks[h] - top[h])
                    rescale[h] = T.if_then_else(whole == T.float32(0.0), T.float32(0.0), T.float32(1.0) / whole)
                for h, d in T.Parallel(heads, D):
                    y[h, d] = T.cast(acc[h, d] * rescale[h], "bfloat16")
            T.dual_copy(y, Y[r, :, :])


def tile_columns(heads: int, size: int, chip: soc.Soc = soc.DEFAULT) -> int:
    """Channels of the sums that come from the cube at a time.

    Raises:
        ValueError: what stays in a vector unit leaves no room for them.
    """
    mine = heads // 2
    kept = mine * size * (4 + 2)  # sums and result
    gathered = HALF * (4 * (size // 4 + size // 128 + 7) + size // 2 + max(32, size // 16)) + 8 * KEYS
    products = 2 * ((HALF + 1) * size + (mine + 1) * KEYS) + 4 * mine * (KEYS + 2 * LANES + 4) + 4 * KEYS
    fits = chip.rows(4 * mine, kept + 2 * gathered + products, most=size)
    return gcd(min(fits, chip.l0b // (2 * 2 * KEYS)), size)


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
    """
    Raises:
        NotImplementedError: channels that are no multiple of 128, or more heads and channels than fit a vector unit.
    """
    rows, heads, size = q.shape
    if rows == 0:
        return torch.empty_like(q)
    padding = -heads % 32
    try:
        if size % 128:
            raise ValueError("channels are no multiple of 128")
        columns = tile_columns(heads + padding, size)
    except ValueError as error:
        raise NotImplementedError(
            f"sparse_attention of ascend-tilelang does not take {heads} heads of {size} channels: {error}; force "
            "sparse_attention=ascend"
        ) from error
    q, sink = torch.nn.functional.pad(q, (0, 0, 0, padding)), torch.nn.functional.pad(sink, (0, padding))
    packed = window.contiguous().view(torch.int32)
    if selected is not None and selected.shape[1]:
        assert latent is not None and latent_scale is not None and page_table is not None and requests is not None
        values, scales = latent.view(torch.int32), latent_scale.view(torch.int32)
        # Behind the last group that is there nothing needs to be read.
        number = torch.arange(1, selected.shape[1] + 1, device=q.device)
        reach = torch.where(selected >= 0, number, 0).amax(1)
        page_table, selected = page_table.contiguous(), selected.contiguous()
    else:  # none is looked at
        values, scales = packed[:, None, : size // 8], packed[:, None, : size // 64]
        page_table, requests, selected, reach = positions[:, None], positions, positions[:, None], positions * 0
    out = torch.empty_like(q)
    attended(
        q.contiguous(),
        packed,
        ring.view(torch.int32),
        values,
        scales,
        page_table,
        requests,
        selected,
        reach.to(torch.int32),
        positions,
        positions - window_len + 1 if block_future is None else window_floor.clamp(min=0),
        positions if block_future is None else positions + block_future,
        window_floor,
        fresh,
        row_slots,
        sink,
        out,
        scale=scale,
        columns=columns,
    )
    return out[:, :heads].contiguous()
