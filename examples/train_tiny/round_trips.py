"""What each number format leaves of a tensor, as one kernel each: ``kernels/reference/formats.py`` without the packing.

Every function is bit-equal to the cast and dequantisation there (a test compares them); ``fused`` makes them cheap on a
GPU. float32 in or bf16 in, float32 out; blocks run along the last dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer_plugin.kernels.reference.formats import (
    BLOCK,
    E2M1_MAX,
    E4M3,
    E4M3_MAX,
    FP4_AMAX_FLOOR,
    FP8_AMAX_FLOOR,
    LATENT_AMAX_FLOOR,
    LATENT_BLOCK,
)

_MANTISSA, _EXPONENT = 0x7FFFFF, 0x7F800000


def _compiled(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    compiled = functools.cache(lambda: torch.compile(function, dynamic=dynamic))

    def call(first: Tensor, *rest: Any) -> Any:
        return (compiled() if first.is_cuda else function)(first, *rest)

    return call


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile an elementwise body on a GPU, where it is bound by memory, once per shape; run it as written on a CPU."""
    return _compiled(function, dynamic=False)


def fused_any_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for bodies that meet many shapes: weights, and whatever depends on the length of the sequences."""
    return _compiled(function, dynamic=True)


@functools.cache
def constant(value: float, device: torch.device) -> Tensor:
    """A divisor on the device: some devices turn a division by a number into a product with its reciprocal, which
    rounds differently.
    """
    return torch.tensor([value], device=device)


def _power_of_two(ratio: Tensor) -> Tensor:
    """The smallest power of two that is not below ``ratio``."""
    return ((ratio.view(torch.int32) + _MANTISSA) & _EXPONENT).view(torch.float32)


def _e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign of x: a sum of steps at the midpoints, ties to the even
    code.
    """
    a = x.abs()
    halves = (a > 0.25).float() + (a >= 0.75).float() + (a > 1.25).float() + (a >= 1.75).float()
    value = 0.5 * halves + (a > 2.5).float() + (a >= 3.5).float() + 2.0 * (a > 5.0).float()
    return torch.copysign(value, x)


@fused
def fp8(x: Tensor, largest: Tensor) -> Tensor:
    """FP8 with a power-of-two scale per 32 channels. ``largest``: E4M3_MAX, a ``constant``."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = _power_of_two(blocks.abs().amax(-1, keepdim=True).clamp(min=FP8_AMAX_FLOOR) / largest)
    return ((blocks / scale).to(E4M3).float() * scale).flatten(-2)


@fused_any_shape
def fp8_tiles(w: Tensor, largest: Tensor) -> Tensor:
    """FP8 weights [N, K] with a scale per 32x32 tile; N and K are multiples of 32."""
    n, k = w.shape
    tiles = w.view(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    scale = _power_of_two(tiles.abs().amax((1, 3), keepdim=True).clamp(min=FP8_AMAX_FLOOR) / largest)
    return ((tiles / scale).to(E4M3).float() * scale).view(n, k)


@fused_any_shape
def mxfp4(x: Tensor, largest: Tensor) -> Tensor:
    """FP4 with a power-of-two scale per 32 channels. ``largest``: E2M1_MAX, a ``constant``."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = _power_of_two(blocks.abs().amax(-1, keepdim=True).clamp(min=FP4_AMAX_FLOOR) / largest)
    return (_e2m1(blocks / scale) * scale).flatten(-2)


def latent(x: Tensor, largest: Tensor) -> Tensor:
    """FP4 with an E4M3 scale per 16 channels. ``largest``: E2M1_MAX, a ``constant``."""
    blocks = x.float().unflatten(-1, (-1, LATENT_BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True).clamp(LATENT_AMAX_FLOOR, E4M3_MAX * E2M1_MAX)
    scale = (amax / largest).to(E4M3).float()
    return (_e2m1(blocks / scale) * scale).flatten(-2)
