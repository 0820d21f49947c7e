"""Launches of the products with FP8 weights (``fp8_linear.cuh``), and the layout of weights that the exact class reads.

float32 activations, a profile for debugging, and weights that the kernel has no tiles for go to the Triton kernels of
``linear.py``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import MULTIPROCESSORS, jit
from . import linear as triton_linear
from .jit import SHARED_BYTES

ROWS = 128  # of a weight tile
UNIT = 128  # channels, which no split divides
WIDTHS = (8, 16, 32, 64, 96, 128, 192, 256)  # tokens of a piece
SHORTEST_SPLIT = 512  # channels
MANY_ROWS = 1024  # beyond, a block adds the splits of its tile itself instead of sending them through memory


@dataclass(frozen=True)
class Class:
    """What a class makes of 128 weight rows x some channels, and of the tokens beside them."""

    file: str
    channels: int
    tile_bytes: int  # with scales
    token_bytes: int
    loops_width: int  # tokens of a piece where splits are added in registers: two sums
    most_splits: int = MULTIPROCESSORS
    columns: int = WIDTHS[-1]  # that are multiplied at a time, if fewer
    deep: int = 0  # a stage of up to so many tokens has two tiles
    swizzled: bool = False


EXACT = Class("fp8_linear.cu", 64, ROWS * 64 + 16, 128, loops_width=192, deep=64)  # bf16 scales of 4 x 2 blocks
CHANNELS, TILE_BYTES = EXACT.channels, EXACT.tile_bytes


@dataclass(frozen=True)
class Weight:
    """tiles: uint8 [groups, blocks of 128 outputs, tiles of channels, bytes of a tile]."""

    tiles: Tensor
    groups: int
    outputs: int  # of a group
    channels: int
    kind: Class = EXACT

    @property
    def splits(self) -> int:
        """Parts that the sum over channels has: as many as fill the GPU, by shape alone."""
        blocks, units = self.groups * self.tiles.shape[1], -(-self.channels // UNIT)
        asked = max(1, min(MULTIPROCESSORS // blocks, self.channels // SHORTEST_SPLIT, self.kind.most_splits))
        return -(-units // -(-units // asked))  # none of them empty

    def width(self, rows: int) -> int:
        """Tokens of a piece: as many as there are, or half of them where that keeps twice as many blocks busy."""
        blocks = self.groups * 2 * -(-self.tiles.shape[1] // 2)
        if 128 < rows <= 256 and 2 * blocks * self.splits <= MULTIPROCESSORS:
            rows = -(-rows // 2)
        return next((width for width in WIDTHS if width >= rows), WIDTHS[-1])


class Kernels(NamedTuple):
    product: jit.Kernel
    arrange: jit.Kernel
    reduce: jit.Kernel
    depth: int  # tiles of a stage
    shared: int  # bytes of dynamic shared memory of the product


@functools.cache
def kernels(kind: Class, width: int, loops: bool, mapped: bool) -> Kernels:
    aligned, depth = 1024 if mapped or kind.swizzled else 128, 2 if width <= kind.deep else 1
    tokens = -(-width * kind.token_bytes * depth // aligned) * aligned
    stage = tokens + -(-kind.tile_bytes * depth // aligned) * aligned
    stages = min(12, (SHARED_BYTES - 512 - aligned) // stage)
    columns = width if width <= kind.columns else width // 2
    product = jit.kernel(kind.file, "product", (columns,), WIDTH=width, COLUMNS=columns, STAGES=stages, DEPTH=depth,
                         LOOPS=int(loops), MAPPED=int(mapped))  # fmt: skip
    arrange, reduce = (jit.kernel_like(product, entry) for entry in ("arrange", "reduce"))
    return Kernels(product, arrange, reduce, depth, stages * stage + aligned)


# ---- layout ---------------------------------------------------------------------------------------------------------


def pack(weight: Tensor, scale: Tensor, groups: int) -> Weight:
    """weight e4m3 [groups * N, K], scale UE8M0 [groups * N / 32, K / 32]; N a multiple of 32 unless it is one group."""
    rows, k = weight.shape
    outputs = rows // groups
    blocks, tiles = -(-outputs // ROWS), -(-k // UNIT) * (UNIT // CHANNELS)
    packed = torch.empty(groups, blocks, tiles, TILE_BYTES, dtype=torch.uint8, device=weight.device)
    if weight.is_meta:  # only shapes are asked for
        return Weight(packed, groups, outputs, k)
    values = weight.contiguous().view(torch.uint8)
    factors = triton_linear.poisoned(values, scale.to(torch.float32)).to(torch.bfloat16)
    per_group = -(-outputs // 32)
    codes = torch.zeros(blocks * ROWS, tiles * CHANNELS, dtype=torch.uint8, device=weight.device)
    scales = torch.zeros(blocks * ROWS // 32, tiles * CHANNELS // 32, dtype=torch.bfloat16, device=weight.device)
    for group in range(groups):  # one at a time, for the memory of the copies
        codes[:outputs, :k] = values[group * outputs : (group + 1) * outputs]
        scales[:per_group, : k // 32] = factors[group * per_group : (group + 1) * per_group]
        # outputs: block, warp, q, two, one; channels: tile, block, step, high, q, one
        fields = codes.view(blocks, 8, 4, 2, 2, tiles, 2, 2, 2, 4, 2).permute(0, 5, 1, 6, 2, 4, 9, 7, 3, 8, 10)
        # .. block, tile, warp, channel block, row (q, one), lane's q, step, row + 8, high, one; warps by warpgroup
        fields = fields.reshape(blocks, tiles, 2, 4, 2, -1).transpose(3, 4)
        packed[group, ..., : ROWS * CHANNELS] = fields.reshape(blocks, tiles, -1)
        tail = scales.view(torch.uint8).view(blocks, 4, tiles, 4).transpose(1, 2)
        packed[group, ..., ROWS * CHANNELS :] = tail.reshape(blocks, tiles, 16)
    return Weight(packed, groups, outputs, k)


def unpack(weight: Weight) -> triton_linear.Weight:
    """The weight as the Triton kernels read it."""
    groups, blocks, tiles, _ = weight.tiles.shape
    fields = weight.tiles[..., : ROWS * CHANNELS].reshape(groups * blocks, tiles, 2, 2, 4, -1).transpose(3, 4)
    fields = fields.reshape(groups * blocks, tiles, 8, 2, 4, 2, 4, 2, 2, 2, 2)
    codes = fields.permute(0, 2, 4, 8, 5, 1, 3, 7, 9, 6, 10).reshape(groups, blocks * ROWS, tiles * CHANNELS)
    tail = weight.tiles[..., ROWS * CHANNELS :].contiguous().view(torch.bfloat16).view(groups, blocks, tiles, 4, 2)
    scales = tail.transpose(2, 3).reshape(groups, blocks * ROWS // 32, tiles * CHANNELS // 32)
    per_group = -(-weight.outputs // 32)
    return triton_linear.Weight(
        codes[:, : weight.outputs, : weight.channels].reshape(-1, weight.channels).contiguous(),
        scales[:, :per_group, : weight.channels // 32].reshape(groups * per_group, -1).float().contiguous(),
        groups,
        weight.outputs,
        weight.channels,
    )


# ---- launches -------------------------------------------------------------------------------------------------------


def multiply(x: Tensor, weight: Weight, cast: bool) -> Tensor:
    """x bf16 [T, groups * K], cast FP8/32 or (exact class) as it is, -> bf16 [T, groups * N]."""
    rows, columns = x.shape[0], weight.groups * weight.outputs
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=x.device)
    if not rows or not columns:
        return out
    x = jit.aligned(x)
    groups, blocks, tiles, _ = weight.tiles.shape
    splits, kind = weight.splits, weight.kind
    loops = splits > 1 and rows > MANY_ROWS
    width = kind.loops_width if loops else weight.width(rows)
    mapped = not cast and weight.channels % UNIT == 0
    product, arrange, reduce, depth, shared = kernels(kind, width, loops, mapped)
    pieces, parts = -(-rows // width), 1 if loops else splits

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    tokens: Tensor | jit.Boxes = jit.Boxes(x, width * depth // 2, kind.channels)
    if not mapped:
        tokens = empty(groups, tiles, pieces * width * kind.token_bytes, dtype=torch.uint8)
        arrange.launch((-(-rows // 8), -(-tiles // 8), groups), 256, 0, x, tokens, rows, pieces * width,
                       weight.channels, int(cast), overlap=True)  # fmt: skip
    sums = empty(parts if parts > 1 else 0, pieces * groups * blocks * ROWS * width, dtype=torch.float32)
    grid = 2 * min(jit.multiprocessors(x.device) // 2, pieces * groups * -(-blocks // 2) * parts)
    product.launch((grid,), 384, shared, weight.tiles, tokens, out, sums, rows, weight.outputs, groups, blocks,
                   tiles // depth, splits, overlap=True)  # fmt: skip
    if parts > 1:
        reduce.launch((groups * blocks * 2, pieces, width // 8), 128, 0, sums, out, rows, weight.outputs, groups,
                      blocks, splits, overlap=True)  # fmt: skip
    return out


# ---- ops ------------------------------------------------------------------------------------------------------------


def prepare_linear(weight: Tensor, scale: Tensor) -> Weight | triton_linear.Weight:
    return prepare_grouped(weight, scale, 1)


def linear(x: Tensor, weight: Weight | triton_linear.Weight) -> Tensor:
    if isinstance(weight, triton_linear.Weight) or x.dtype == torch.float32:
        return triton_linear.linear(x, _triton(weight))
    return multiply(x.contiguous(), weight, cast=True)


def prepare_grouped(weight: Tensor, scale: Tensor, groups: int) -> Weight | triton_linear.Weight:
    if tileable(weight, groups):
        return pack(weight, scale, groups)
    if groups == 1:
        return triton_linear.prepare_linear(weight, scale)
    return triton_linear.prepare_grouped(weight, scale, groups)


def tileable(weight: Tensor, groups: int) -> bool:
    outputs = weight.shape[0] // groups
    return outputs > 0 and outputs % 4 == 0 and (groups == 1 or outputs % 32 == 0)


def grouped_linear(o: Tensor, weight: Weight | triton_linear.Weight, fp8: bool) -> Tensor:
    if isinstance(weight, triton_linear.Weight) or o.dtype == torch.float32:
        return triton_linear.grouped_linear(o, _triton(weight), fp8)
    out = multiply(o.contiguous().flatten(1), weight, cast=fp8)
    return triton_linear.round_trip(out) if fp8 else out


def _triton(weight: Weight | triton_linear.Weight) -> triton_linear.Weight:
    return unpack(weight) if isinstance(weight, Weight) else weight
