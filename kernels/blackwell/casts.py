"""Casts of activations to what ``deep_gemm`` reads: values, and their scales apart, four UE8M0 bytes in an int32.

Scales of a matrix lie row by row within a column of words (the library calls it MN-major), each column padded to
``ALIGN`` rows, so that they are read in bulk. Weights' scales are laid out once, by ``pack_scales``.

Tiles: a program is one row with all its channels. A row may be another row of the input, which makes the copies that a
grouped product needs while they are cast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cuda.formats import fp4_cast, fp8_cast, widen

WORD = 128  # channels of four scales
ALIGN = 4  # rows


@triton.jit
def _words(byte):
    """UE8M0 bytes int32 [1, 4 * n] -> int32 [1, n], the first in the low byte."""
    four = tl.reshape(byte, (byte.shape[1] // 4, 4)) << (8 * tl.arange(0, 4))[None, :]
    return tl.sum(four, axis=1)[None, :]


@triton.jit
def _cast_fp8(
    x, source, values, scales, x_row, column, size: tl.constexpr, words: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = row
    if source is not None:
        place = tl.load(source + row)
    channel = tl.arange(0, SIZE)[None, :]
    given = tl.load(x + place * x_row + channel, mask=(channel < size) & (place >= 0), other=0.0)
    codes, byte = fp8_cast(widen(given))
    word = tl.arange(0, SIZE // 128)[None, :]
    tl.store(values + row * size + channel, codes, mask=channel < size)
    tl.store(scales + word * column + row, _words(byte), mask=word < words)


def cast_fp8(x: Tensor, source: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """bf16 [T, K] -> e4m3 [M, K] and packed scales int32 [M, ceil(K/128)]. source: int64 [M], the row of x from which
    each row is made, negative for zeros; None: all rows as they are."""
    size = x.shape[1]
    rows = x.shape[0] if source is None else source.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    values = torch.empty(rows, size, dtype=torch.uint8, device=x.device)
    scales = _scales(rows, -(-size // WORD), x.device)
    width = max(WORD, triton.next_power_of_2(size))
    if rows:
        _cast_fp8[(rows,)](
            x, source, values, scales, x.stride(0), scales.stride(1), size, scales.shape[1], width,
            num_warps=max(1, min(8, width // 512)),
        )  # fmt: skip
    return values.view(torch.float8_e4m3fn), scales


@triton.jit
def _cast_fp4(x, values, scales, x_row, heads: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    channel, pair = tl.arange(0, SIZE)[None, :], tl.arange(0, SIZE // 2)[None, :]
    given = tl.load(x + row * x_row + head * SIZE + channel, mask=head < heads, other=0.0)
    codes, byte = fp4_cast(widen(given))
    four = byte << (8 * tl.arange(0, SIZE // 32))[None, :]
    at = row * heads + head
    tl.store(values + at * (SIZE // 2) + pair, codes, mask=head < heads)
    tl.store(scales + at, tl.sum(four, axis=1)[:, None], mask=head < heads)


def cast_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 [T, heads, 128] -> packed e2m1 int8 [T, heads, 64] and their four scales int32 [T, heads]."""
    rows, heads, size = x.shape
    assert size == WORD
    x = x if x.stride()[1:] == (size, 1) else x.contiguous()
    values = torch.empty(rows, heads, size // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, heads, dtype=torch.int32, device=x.device)
    if rows:
        _cast_fp4[(rows,)](x, values, scales, x.stride(0), heads, triton.next_power_of_2(heads), size)
    return values.view(torch.int8), scales


def pack_scales(scale: Tensor, rows: int) -> Tensor:
    """UE8M0 scales [..., rows / n, K/32], one for n rows, -> packed int32 [..., rows, ceil(K/128)]."""
    byte = scale.view(torch.uint8)
    if byte.shape[-2] != rows:
        byte = byte.repeat_interleave(-(-rows // byte.shape[-2]), -2)[..., :rows, :]
    byte = torch.nn.functional.pad(byte, (0, -byte.shape[-1] % 4)).contiguous()
    words = byte.view(torch.int32)
    groups = words.shape[:-2]
    packed = _scales(rows, words.shape[-1], scale.device, groups)
    return packed.copy_(words)


def unpack_scales(packed: Tensor, channels: int) -> Tensor:
    """Packed int32 [rows, ceil(K/128)] -> UE8M0 [rows, K/32]: ``pack_scales`` of a scale per row undone."""
    byte = packed.flatten().view(torch.uint8).view(packed.shape[0], -1)
    return byte[:, : channels // 32].view(torch.float8_e8m0fnu)


def _scales(rows: int, words: int, device: torch.device, groups: tuple[int, ...] = ()) -> Tensor:
    """Uninitialised int32 [*groups, rows, words], a column padded to ``ALIGN`` rows."""
    column = -(-rows // ALIGN) * ALIGN
    strides = [column * words] * len(groups) + [1, column]
    return torch.empty_strided((*groups, rows, words), strides, dtype=torch.int32, device=device)
