"""The fast class of the routed experts (``experts_fp8.cu``): FP8 tensor cores, bfloat16 activations only.

It rounds where the exact class does. Beyond that:

* The products of 128 channels are added with some 14 bits, then in float32.
* A token's FP8/32 values have one scale for 128 channels and are rounded to multiples of 2^-9 of it, an error of less
  than 2^-17 of the largest value there.
* A weight block whose scale is below 2^-11 of the largest of its row is rounded to the e2m1 grid of that scale, an
  error of at most 2^-13 of the row's largest scale.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference
from . import jit
from .experts import (
    BLOCK,
    CHANNELS,
    ROWS,
    TILE_BYTES,
    Experts,
    Tiling,
    combine,
    empty_tiles,
    fill,
    gather,
    in_passes,
    laid_out,
    multiply,
    padded,
    products,
    read_with,
    replace_with,
    route,
    spread,
)
from .jit import SHARED_BYTES

# With many tokens an expert, its weights are dequantised for more of them at a time: a warpgroup has two tiles of rows.
FEW, MANY = Tiling(64, 8, 4), Tiling(128, 16, 2)
BINADES = 12  # of scales in which an e2m1 code is a normal e4m3 value: exponents -5 to 6
LARGEST = 6
NAN_BITS = 0x7FC00000
# Code of the nearest e2m1 magnitude to that of a code over 2^n, ties to even codes.
ROUNDED = (
    (0, 1, 2, 3, 4, 5, 6, 7),
    (0, 0, 1, 2, 2, 3, 4, 5),
    (0, 0, 0, 1, 1, 2, 2, 3),
    (0, 0, 0, 0, 0, 1, 1, 2),
    (0, 0, 0, 0, 0, 0, 0, 1),
    (0, 0, 0, 0, 0, 0, 0, 0),
)


@dataclass(frozen=True)
class Product:
    """The weights of one product, for all experts."""

    tiles: Tensor  # uint8 [experts, row tiles / BLOCK, channel tiles, BLOCK, TILE_BYTES]
    factors: Tensor  # float32 [experts, rows], powers of two taken out of the scales; NaN where a scale of the row is


def kernel(experts: Experts[Product], tiling: Tiling, topk: int) -> tuple[jit.Kernel, int]:
    """The kernel of both products, and the bytes of shared memory it wants."""
    count, columns = experts.down.tiles.shape[0], tiling.columns
    stage = BLOCK * TILE_BYTES + columns * (CHANNELS + 4)
    static = 4 * (count + 1) + 32 * columns + 1024  # and barriers
    stages = min(12, (SHARED_BYTES - static) // stage)
    return products("experts_fp8.cu", experts, tiling, topk, stages), stages * stage


def prepare_experts(w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> Experts[Product]:
    return laid_out(pack, w13, s13, w2, s2)


def replace_expert(experts: Experts[Product], slot: int, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> None:
    replace_with(_pack_one, experts, slot, w13, s13, w2, s2)


def read_expert(experts: Experts[Product], slot: int) -> reference.moe.Expert:
    """With what was rounded as it was laid out: laid out once more it is the same."""
    return read_with(_unpack_one, experts, slot)


def pack(codes: Tensor, scales: Tensor, rows: Tensor) -> Product:
    """codes uint8 [E, N, K/2], scales UE8M0 [E, N, K/32], ``rows`` int64: which row comes where."""
    experts, _, half = codes.shape
    tiles = empty_tiles(experts, rows.shape[0], 2 * half, codes.device)
    factors = torch.empty(experts, tiles.shape[1] * BLOCK * ROWS, dtype=torch.float32, device=codes.device)
    if codes.is_meta:  # only shapes are asked for
        return Product(tiles, factors)
    for expert in range(experts):  # one at a time: the unpacked form is eight times as large
        _pack_one(codes[expert], scales[expert], rows, tiles[expert], factors[expert])
    return Product(tiles, factors)


def _pack_one(codes: Tensor, scales: Tensor, rows: Tensor, tiles: Tensor, factors: Tensor) -> None:
    """One expert into its tiles and its factors."""
    shape, given, blocks = (factors.shape[0], tiles.shape[1] * 4), codes[rows], scales.shape[1]
    nibbles = torch.zeros(*shape, 32, dtype=torch.uint8, device=codes.device)
    nibbles[: rows.shape[0], :blocks] = torch.stack((given & 15, given >> 4), -1).view(-1, blocks, 32)
    exponents = torch.zeros(shape, dtype=torch.int32, device=codes.device)
    exponents[: rows.shape[0], :blocks] = scales.view(torch.uint8)[rows]

    missing = exponents == 255
    used = ((nibbles & 7) != 0).any(-1) & ~missing
    largest = exponents.masked_fill(~used, 0).amax(-1, keepdim=True)
    below = (largest - exponents).clamp(min=0)  # a block of zeros may have any scale
    stored = (BINADES - 1 - below).clamp(min=0).masked_fill(missing, 255).to(torch.uint8)
    beyond = (below - BINADES + 1).clamp(0, len(ROUNDED) - 1)
    nibbles = _rounded(codes.device)[beyond[..., None] * 8 + (nibbles & 7)] | nibbles & 8

    fill(tiles, _words(nibbles.flatten(1)), stored)
    largest = largest[:, 0]
    factor = torch.exp2((largest - 127 - LARGEST).to(torch.float64)).to(torch.float32)
    # A missing scale makes the row NaN for whoever chose the expert, so it can be in the factor, beside the largest.
    spoiled = (largest | NAN_BITS).view(torch.float32)
    factors.copy_(torch.where(missing.any(-1), spoiled, factor))


@functools.cache
def _rounded(device: torch.device) -> Tensor:
    """``ROUNDED`` as uint8 [6 * 8]; made once, for it is a copy that waits for the device."""
    return torch.tensor(ROUNDED, dtype=torch.uint8, device=device).flatten()


def _words(nibbles: Tensor) -> Tensor:
    """e2m1 codes uint8 [N, K] -> uint8 [N/64, K/128, 4096]: 32-bit words, [two rows of a lane][lane][block of 32
    channels]; each has four neighbouring codes and the four that are 16 channels on."""
    row_tiles, channel_tiles = nibbles.shape[0] // ROWS, nibbles.shape[1] // CHANNELS
    # rows: tile, warp, half, eighth; channels: tile, block, high, owner, code
    fields = nibbles.view(row_tiles, 4, 2, 8, channel_tiles, 4, 2, 4, 4).permute(0, 4, 2, 1, 3, 7, 5, 6, 8)
    word = torch.zeros(fields.shape[:-2], dtype=torch.int32, device=nibbles.device)
    for high in range(2):
        for place in range(4):
            code = fields[..., high, place].to(torch.int32)
            word |= (code & 7) << (16 * high + 4 * place) | (code >> 3) << (8 * place + 7 - 4 * high)
    return word.reshape(row_tiles, channel_tiles, -1).view(torch.uint8)


def _unpack_one(tiles: Tensor, factors: Tensor, rows: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [N, K/2] and scales UE8M0 [N, K/32] of an expert."""
    words, stored = spread(tiles)
    exponent = factors.double().log2().round().nan_to_num(0).to(torch.int32)
    largest = torch.where(factors.isnan(), factors.view(torch.int32) & 0xFF, exponent + 127 + LARGEST)
    scales = (largest[:, None] - (BINADES - 1) + stored.to(torch.int32)).clamp(min=0)
    scales = scales.masked_fill(stored == 255, 255).to(torch.uint8)
    place = rows.argsort()  # of each row among the tiles'
    nibbles = _nibbles(words)[place, :channels]
    codes = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    return codes, scales[place, : channels // 32].view(torch.float8_e8m0fnu)


def _nibbles(words: Tensor) -> Tensor:
    """uint8 [N/64, K/128, 4096] -> e2m1 codes uint8 [N, K]: ``_words`` undone."""
    row_tiles, channel_tiles, _ = words.shape
    # half, warp, eighth, owner, block
    word = words.contiguous().view(torch.int32).view(row_tiles, channel_tiles, 2, 4, 8, 4, 4)
    codes = [
        ((word >> 16 * high + 4 * place & 7) | (word >> 8 * place + 7 - 4 * high & 1) << 3).to(torch.uint8)
        for high in range(2)
        for place in range(4)
    ]
    fields = torch.stack(codes, -1).unflatten(-1, (2, 4)).permute(0, 3, 2, 4, 1, 6, 7, 5, 8)
    return fields.reshape(row_tiles * ROWS, channel_tiles * CHANNELS)


def moe_experts(x: Tensor, weights: Tensor, ids: Tensor, experts: Experts[Product], limit: float) -> Tensor:
    """
    Raises:
        ValueError: activations that are not bfloat16.
    """
    if x.dtype != torch.bfloat16:
        raise ValueError(f"moe_experts of cuda-fast takes bfloat16 activations, not {x.dtype}")
    return in_passes(_pass, x, weights, ids, experts, limit)


def _pass(x: Tensor, weights: Tensor, ids: Tensor, experts: Experts[Product], limit: float, out: Tensor) -> None:
    topk = ids.shape[1]
    kernels = [kernel(experts, tiling, topk) for tiling in (FEW, MANY)]
    like = kernels[0][0]
    routing = route(like, weights, ids, experts.down.tiles.shape[0])
    positions = routing.order.shape[0]
    values, scales = [], []
    for channels in (padded(experts.hidden), padded(experts.inner)):
        values.append(torch.empty(positions, channels, dtype=torch.uint8, device=x.device))
        scales.append(torch.empty(positions, channels // CHANNELS, dtype=torch.float32, device=x.device))
    down = x.new_empty(ids.numel(), experts.hidden)
    gather(like, x, routing, values[0], scales[0])
    tensors = (values[0], scales[0], values[1], scales[1], down)
    multiply(experts, routing, (FEW, MANY), kernels, ids.shape, tensors, limit)
    combine(like, down, ids, out)
