"""The number formats of DeepSeek-V4.1, exact to the bit: FP8 with UE8M0 scales, MXFP4, the two FP4 forms of the pages.

Every cast rounds to nearest, ties to even. Every dequantisation returns float32 and is exact (bfloat16 holds the
result too, except weights whose 32x32 scale is near the end of its range). ``x`` is bfloat16 or float32; a block is a
run of channels of the last dimension that shares one scale.

A block that holds a NaN or an infinity becomes a block with a NaN scale, so it dequantises to all NaN: bad numbers
stay visible and never turn into a plausible 448.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
E4M3_MAX = 448.0
E2M1_MAX = 6.0
BLOCK = 32  # channels per UE8M0 scale
LATENT_BLOCK = 16  # channels per E4M3 scale of a compressed latent

FP8_AMAX_FLOOR = 1e-4
FP4_AMAX_FLOOR = 6.0 * 2.0**-126  # smallest normal power-of-two scale
LATENT_AMAX_FLOOR = 6.0 * 2.0**-9  # smallest E4M3 scale

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Between codes 0..7. A midpoint belongs to the even code: to the lower one for every other midpoint, to the upper one
# for the rest, whose boundary is therefore one float32 step lower.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

_constants: dict[tuple[str, torch.device], Tensor] = {}


def _constant(name: str, device: torch.device) -> Tensor:
    tensor = _constants.get((name, device))
    if tensor is None:
        # Made once for the process: neither the default dtype nor the default device of the first caller may matter.
        if name == "boundaries":
            points = torch.tensor(_MIDPOINTS, dtype=torch.float32, device="cpu")
            lower = torch.nextafter(points, torch.zeros_like(points))
            tensor = torch.where(torch.arange(7, device="cpu") % 2 == 1, lower, points)
        elif name == "pairs":  # byte -> its two values, low nibble first
            values = torch.tensor(_E2M1 + tuple(-v for v in _E2M1), dtype=torch.float32, device="cpu")
            byte = torch.arange(256, device="cpu")
            tensor = torch.stack((values[byte & 15], values[byte >> 4]), -1)
        else:
            tensor = torch.tensor([float(name)], dtype=torch.float32, device="cpu")
        tensor = _constants[name, device] = tensor.to(device)
    return tensor


# ---- scales --------------------------------------------------------------------------------------------------------


def _power_of_two_scale(amax: Tensor, largest: float) -> Tensor:
    """2^ceil(log2(amax / largest)) as float32, infinite for a non-finite amax. ``amax`` is positive float32.

    The quotient is a true division (by a tensor: some devices turn a division by a number into a product with its
    reciprocal, which can land one ulp above a power of two and double the scale).
    """
    bits = (amax / _constant(str(largest), amax.device)).view(torch.int32)
    # NaN and infinity both end on the all-ones exponent.
    return bits.clamp_(max=0x7F800000).add_(0x7FFFFF).bitwise_and_(0x7F800000).view(torch.float32)


def _e8m0_bytes(scale: Tensor) -> Tensor:
    """UE8M0 of powers of two; infinity becomes 255, the NaN of the format."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8).view(E8M0)


def e8m0_value(scale: Tensor) -> Tensor:
    """float32 value of UE8M0 scales given as float8_e8m0fnu or their bytes. 255 is NaN."""
    return scale.view(E8M0).to(torch.float32)


def _blocks(x: Tensor, block: int) -> Tensor:
    if x.shape[-1] % block:
        raise ValueError(f"last dimension must be a multiple of {block}, got shape {tuple(x.shape)}")
    return x.to(torch.float32).unflatten(-1, (-1, block))


# ---- FP8 -----------------------------------------------------------------------------------------------------------


def _fp8_scale(blocks: Tensor) -> Tensor:
    return _power_of_two_scale(blocks.abs().amax(-1, keepdim=True).clamp_(min=FP8_AMAX_FLOOR), E4M3_MAX)


def fp8_cast(x: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """x [..., K] -> values e4m3 [..., K], scales UE8M0 [..., K/block]. amax floor 1e-4."""
    blocks = _blocks(x, block)
    scale = _fp8_scale(blocks)
    return (blocks / scale).to(E4M3).flatten(-2), _e8m0_bytes(scale.squeeze(-1))


def fp8_dequant(values: Tensor, scale: Tensor) -> Tensor:
    """values e4m3 [..., K], scales UE8M0 [..., K/block] -> float32 [..., K]. The block is K / number of scales."""
    blocks = values.to(torch.float32).unflatten(-1, (scale.shape[-1], -1))
    return (blocks * e8m0_value(scale)[..., None]).flatten(-2)


def fp8_round_trip(x: Tensor) -> Tensor:
    """What FP8/32 leaves of x, as float32."""
    blocks = _blocks(x, BLOCK)
    scale = _fp8_scale(blocks)
    return (blocks / scale).to(E4M3).to(torch.float32).mul_(scale).flatten(-2)


def fp8_weight_cast(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [N, K] -> values e4m3 [N, K], scales UE8M0 [ceil(N/32), ceil(K/32)], one per 32x32 tile (less at the edges)."""
    n, k = w.shape
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK, dtype=torch.float32, device=w.device)
    padded[:n, :k] = w
    tiles = padded.view(rows, BLOCK, columns, BLOCK)
    scale = _power_of_two_scale(tiles.abs().amax((1, 3)).clamp_(min=FP8_AMAX_FLOOR), E4M3_MAX)
    values = (tiles / scale[:, None, :, None]).to(E4M3)
    return values.view(rows * BLOCK, columns * BLOCK)[:n, :k].contiguous(), _e8m0_bytes(scale)


def fp8_weight_dequant(values: Tensor, scale: Tensor) -> Tensor:
    """values e4m3 [..., N, K], scales UE8M0 [..., ceil(N/32), ceil(K/32)] -> float32 [..., N, K]."""
    n, k = values.shape[-2:]
    full = e8m0_value(scale).repeat_interleave(BLOCK, -1)[..., :k].repeat_interleave(BLOCK, -2)[..., :n, :]
    return values.to(torch.float32) * full


# ---- FP4 -----------------------------------------------------------------------------------------------------------


def _e2m1_codes(x: Tensor) -> Tensor:
    """uint8 codes of scaled float32 values: 3 bits of magnitude, saturating at 6, and the sign bit, zeros included."""
    magnitude = torch.bucketize(x.abs().contiguous(), _constant("boundaries", x.device), out_int32=True).to(torch.uint8)
    return magnitude | (torch.signbit(x).to(torch.uint8) << 3)


def _pack(codes: Tensor) -> Tensor:
    """Two codes a byte, the even channel in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def e2m1_values(packed: Tensor) -> Tensor:
    """packed uint8 [..., K/2] -> float32 [..., K] unscaled values."""
    pairs = _constant("pairs", packed.device).index_select(0, packed.flatten().to(torch.int32))
    return pairs.view(*packed.shape[:-1], 2 * packed.shape[-1])


def mxfp4_cast(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [..., K] -> packed e2m1 uint8 [..., K/2], scales UE8M0 [..., K/32]. amax floor 6 * 2^-126."""
    blocks = _blocks(w, BLOCK)
    scale = _power_of_two_scale(blocks.abs().amax(-1, keepdim=True).clamp_(min=FP4_AMAX_FLOOR), E2M1_MAX)
    return _pack(_e2m1_codes(blocks / scale).flatten(-2)), _e8m0_bytes(scale.squeeze(-1))


def mxfp4_dequant(packed: Tensor, scale: Tensor) -> Tensor:
    """packed uint8 [..., K/2], scales UE8M0 [..., K/32] (float8_e8m0fnu or uint8) -> float32 [..., K]."""
    return (e2m1_values(packed).unflatten(-1, (-1, BLOCK)) * e8m0_value(scale)[..., None]).flatten(-2)


# Index queries and keys use the same format as expert weights; the name says which contract a caller relies on.
index_cast = mxfp4_cast
index_dequant = mxfp4_dequant


def latent_cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> packed e2m1 uint8 [..., D/2], scales e4m3 [..., D/16].

    The scale is RNE_e4m3(max(amax, 6 * 2^-9) / 6), at most 448; beyond 2688 values saturate. Values are divided by it:
    a product with its reciprocal would move some exact midpoints.
    """
    blocks = _blocks(x, LATENT_BLOCK)
    amax = blocks.abs().amax(-1)
    amax = torch.where(amax == torch.inf, torch.nan, amax).clamp_(LATENT_AMAX_FLOOR, E4M3_MAX * E2M1_MAX)
    scale = (amax / _constant(str(E2M1_MAX), amax.device)).to(E4M3)
    return _pack(_e2m1_codes(blocks / scale.to(torch.float32)[..., None]).flatten(-2)), scale


def latent_dequant(packed: Tensor, scale: Tensor) -> Tensor:
    """packed uint8 [..., D/2], scales e4m3 [..., D/16] (float8_e4m3fn or uint8) -> float32 [..., D]."""
    scale = scale.view(E4M3).to(torch.float32)
    return (e2m1_values(packed).unflatten(-1, (-1, LATENT_BLOCK)) * scale[..., None]).flatten(-2)
