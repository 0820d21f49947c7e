"""moe_experts on the cube: the weights of an expert, widened on the vector units a part at a time, times the rows that
chose it. One kernel for both products; what lies between is plain operations.

Rows are cast FP8/32 and widened again, weights are MXFP4: bf16 holds both exactly, so a product is exact and only
their sums round. Weights stay as they are in the checkpoint, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import tilelang
import tilelang.ascend.language as T
import torch
from tilelang.layout import make_ascend_compact_nz_layout
from torch import Tensor

from .. import formats
from ..gate import swiglu
from . import bits

OUT = 64  # outputs of a tile
HALF = OUT // 2  # of a vector unit
FEW, MANY = 32, 128  # rows of a tile


@tilelang.jit(target="ascend", pass_configs=bits.APART)
def grouped(X, W, S, slot, used, Y, depth: int = 256, cores: int = 32, threads: int = 256):
    """X bf16 [A, M, K], tiles of rows with one expert, slot int64 [A], W int32 [E, N, K/8] eight e2m1 codes a word, S
    int32 [E, N, K/128] four UE8M0 scales a word -> Y bf16 [A, M, N], of the first ``used`` int32 [1] tiles.

    M a multiple of 32, N of 64, K of ``depth`` and that of 128.
    """
    A, E, N = T.dynamic("A, E, N")
    M, K = T.const("M, K")
    X: T.Tensor((A, M, K), T.bfloat16)
    W: T.Tensor((E, N, K // 8), T.int32)
    S: T.Tensor((E, N, K // 128), T.int32)
    slot: T.Tensor((A,), T.int64)
    used: T.Tensor((1,), T.int32)
    Y: T.Tensor((A, M, N), T.bfloat16)
    with T.MixedKernel(cores) as (core, unit):
        rows = T.alloc_l1((M, depth), T.bfloat16)
        weights = T.alloc_l1((OUT, depth), T.bfloat16)
        sums = T.alloc_l0c((M, OUT), T.float32)
        codes = T.alloc_shared((HALF, depth // 8), T.int32)
        scales = T.alloc_shared((HALF, (K // 128 + 7) // 8 * 8), T.int32)
        wide = T.alloc_shared((HALF + 1, depth), T.bfloat16)
        T.annotate_layout({wide: make_ascend_compact_nz_layout(wide)})
        dot = T.alloc_shared((M // 2, OUT), T.float32)
        y = T.alloc_shared((M // 2, OUT), T.bfloat16)
        parts = N // OUT
        for i in T.serial(T.ceildiv(T.max(used[0] * parts - core, 0), cores)):
            tile = (core + i * cores) // parts
            first = (core + i * cores) % parts * OUT
            place = slot[tile]
            mine = first + unit * HALF
            T.copy(S[place, mine : mine + HALF, :], scales[:, 0 : K // 128])
            for c in T.Pipelined(K // depth, num_stages=2):
                T.copy(W[place, mine : mine + HALF, c * (depth // 8) : (c + 1) * (depth // 8)], codes)
                with T.SimtVF(threads=threads):
                    for n, w in T.Parallel(HALF, depth // 8):
                        word = T.alloc_var(T.int32)
                        factor = T.alloc_var(T.float32)
                        word = codes[n, w]
                        block = c * (depth // 32) + w // 4
                        byte = T.bitwise_and(T.shift_right(scales[n, block // 4], 8 * (block % 4)), 255)
                        factor = bits.e8m0_value(byte)
                        for j in T.serial(8):
                            value = bits.e2m1_value(T.bitwise_and(T.shift_right(word, 4 * j), 15)) * factor
                            wide[n, w * 8 + j] = T.cast(value, "bfloat16")
                T.dual_copy(wide[0:HALF, :], weights)
                T.copy(X[tile, :, c * depth : (c + 1) * depth], rows)
                T.gemm(rows, weights, sums, transpose_B=True, clear_accum=(c == 0))
            T.dual_copy(sums, dot)
            with T.SimtVF(threads=threads):
                for m, n in T.Parallel(M // 2, OUT):
                    y[m, n] = T.cast(dot[m, n], "bfloat16")
            T.dual_copy(y, Y[tile, :, first : first + OUT])


@dataclass
class Experts:
    """Contiguous, as given: w uint8 [E, N, K/2] packed e2m1, s UE8M0 [E, N, K/32]."""

    w13: Tensor
    s13: Tensor
    w2: Tensor
    s2: Tensor


def prepare_experts(w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> Experts:
    return Experts(*(part.contiguous() for part in (w13, s13, w2, s2)))


def read_expert(experts: Experts, slot: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return experts.w13[slot], experts.s13[slot], experts.w2[slot], experts.s2[slot]


def replace_expert(experts: Experts, slot: int, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> None:
    for stored, new in zip(read_expert(experts, slot), (w13, s13, w2, s2), strict=True):
        stored.copy_(new)


@dataclass
class Tiles:
    """Pairs of token and choice, sorted by expert, in tiles of one expert. ``pair`` int64 [A, M]: the one in each row,
    any where there is none; ``slot`` int64 [A]; ``used`` int32 [1]: how many have pairs; ``row`` int64 [pairs]: where
    each is, A * M if it has no expert here."""

    pair: Tensor
    slot: Tensor
    used: Tensor
    row: Tensor


def tiles_of(ids: Tensor, count: int, size: int) -> Tiles:
    """ids int64 [T, k] of ``count`` experts, -1: none; ``size`` rows a tile. How many there are of each stays on the
    device: there are as many tiles as there can be at most."""
    flat = torch.where(ids < 0, count, ids).flatten()
    most = min(flat.shape[0], count) + flat.shape[0] // size
    order = torch.sort(flat, stable=True).indices
    own = flat[:, None] == torch.arange(count, device=ids.device)
    pairs = own.to(torch.int64).sum(0)
    needed = (pairs + size - 1) // size
    last, ends = needed.cumsum(0), pairs.cumsum(0)
    expert = flat.index_select(0, order).clamp(max=count - 1)
    within = torch.arange(order.shape[0], device=ids.device) - (ends - pairs).index_select(0, expert)
    row = (last - needed).index_select(0, expert) * size + within
    row = torch.where(flat.index_select(0, order) < count, row, most * size)
    pair = torch.zeros(most * size + 1, dtype=torch.int64, device=ids.device).scatter(0, row, order)
    slot = (torch.arange(most, device=ids.device)[:, None] >= last).to(torch.int64).sum(1).clamp(max=count - 1)
    return Tiles(
        pair[:-1].view(most, size),
        slot,
        last[-1:].to(torch.int32),
        torch.empty_like(row).scatter(0, order, row),
    )


def product(x: Tensor, packed: Tensor, scale: Tensor, tiles: Tiles) -> Tensor:
    """bf16 [A * M, N] of the rows x [A * M, K], cast FP8/32; rows without a pair undefined."""
    most, size = tiles.pair.shape
    exact = formats.fp8_dequant(*formats.fp8_cast(x)).to(torch.bfloat16)
    out = torch.empty(most, size, packed.shape[1], dtype=torch.bfloat16, device=x.device)
    grouped(
        exact.view(most, size, -1),
        packed.view(torch.int32),
        scale.view(torch.uint8).view(torch.int32),
        tiles.slot,
        tiles.used,
        out,
        depth=gcd(x.shape[1], 256),
    )
    return out.flatten(0, 1)


def moe_experts(x: Tensor, weights: Tensor, ids: Tensor, experts: Experts, limit: float) -> Tensor:
    """
    Raises:
        NotImplementedError: channels that are no multiples of 128.
    """
    (tokens, topk), (count, hidden, half) = ids.shape, experts.w2.shape
    inner = 2 * half
    if hidden % 128 or inner % 128:
        raise NotImplementedError(
            f"moe_experts of ascend-tilelang takes channels in multiples of 128, got {hidden} and {inner}; force "
            "moe_experts=ascend"
        )
    if tokens == 0:
        return x.new_zeros(0, hidden, dtype=torch.float32)
    tiles = tiles_of(ids, count, FEW if tokens * topk <= FEW * count else MANY)
    pair = tiles.pair.flatten()
    both = product(x.index_select(0, pair // topk), experts.w13, experts.s13, tiles)
    gated = swiglu(both[:, :inner], both[:, inner:], limit, weights.flatten().index_select(0, pair))
    down = product(gated, experts.w2, experts.s2, tiles)
    down = torch.nn.functional.pad(down, (0, 0, 0, 1))  # of pairs that have no expert here
    # A token's choices in ascending expert, then added in float32 one by one.
    by_expert = torch.sort(tiles.row.view(tokens, topk), dim=-1).values
    total = down.index_select(0, by_expert[:, 0]).to(torch.float32)
    for j in range(1, topk):
        total = total + down.index_select(0, by_expert[:, j]).to(torch.float32)
    return total
