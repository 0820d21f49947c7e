"""Device functions of the number formats, equal to ``kernels.reference.formats`` to the bit.

Building blocks for Triton kernels; nothing here is launched by itself. A *tile* is float32 [M, K] in registers, a
*block* a run of 32 (or 16) channels of a row that shares one scale. Codes and UE8M0 bytes travel as int32 and are
narrowed by whoever stores them.

Scales are found on the integer bits of float32. The largest magnitude of a block is an integer maximum, so a NaN beats
everything and is never dropped by a ``max`` that ignores it. 2^ceil(log2(amax / 448)) then needs no division: 448 is
1.75 * 2^8, so the quotient passes a power of two exactly when the significand passes 1.75, and one step of float32
above that the correctly rounded quotient has passed it too. The same holds for 6 = 1.5 * 2^2.

Triton's interpreter truncates where it should round to bfloat16 and does not know the NaN of e4m3. Kernels that should
also run there use ``to_bfloat16``, ``widen`` and ``e4m3_value`` in the place of casts; on the device these are plain
conversions.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)

FP8_AMAX_FLOOR_BITS = tl.constexpr(0x38D1B717)  # 1e-4
FP4_AMAX_FLOOR_BITS = tl.constexpr(0x01C00000)  # 6 * 2^-126, whose scale is the smallest normal power of two
LATENT_AMAX_FLOOR = tl.constexpr(6.0 * 2.0**-9)  # smallest E4M3 scale
LATENT_AMAX_CEILING = tl.constexpr(448.0 * 6.0)


# ---- casts that also work in the interpreter ------------------------------------------------------------------------


@triton.jit
def widen(x):
    """bfloat16 or float32 -> float32, subnormals and NaN included."""
    if INTERPRET and x.dtype == tl.bfloat16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        out = bits.to(tl.float32, bitcast=True)
    else:
        out = x.to(tl.float32)
    return out


@triton.jit
def to_bfloat16(x):
    """float32 -> bfloat16, nearest even."""
    if INTERPRET:
        bits = x.to(tl.int32, bitcast=True)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        bits = tl.where(is_nan, 0x7FC00000, bits)
        bits += 0x7FFF + ((bits >> 16) & 1)
        out = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        out = x.to(tl.bfloat16)
    return out


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 -> bfloat16 or float32: the one rounding of a result."""
    return to_bfloat16(x) if dtype == tl.bfloat16 else x


# ---- scales ---------------------------------------------------------------------------------------------------------


@triton.jit
def magnitude_bits(x):
    """float32 -> int32 bits of |x|; they order like the magnitudes, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def fp8_scale_byte(amax_bits):
    """Bits of a block's largest magnitude -> its UE8M0 byte as int32, 255 for NaN and infinity. amax floor 1e-4."""
    bits = tl.maximum(amax_bits, FP8_AMAX_FLOOR_BITS)
    # Beyond significand 1.75 (0x600000) the addition carries into the exponent.
    return tl.where(bits >= 0x7F800000, 255, ((bits + 0x1FFFFF) >> 23) - 8)


@triton.jit
def fp4_scale_byte(amax_bits):
    """As ``fp8_scale_byte`` for e2m1 with UE8M0 scales: largest value 6, amax floor 6 * 2^-126."""
    bits = tl.maximum(amax_bits, FP4_AMAX_FLOOR_BITS)
    return tl.where(bits >= 0x7F800000, 255, ((bits + 0x3FFFFF) >> 23) - 2)


@triton.jit
def e8m0_value(byte):
    """UE8M0 byte (any integer type) -> float32: 2^(byte - 127), subnormal 2^-127 for 0, NaN for 255."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, 0x400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e8m0_reciprocal(byte):
    """1 / scale for a scale byte of a cast (1..253, or 255 as infinity: zero). Exact, so x * this is x / scale."""
    bits = (254 - tl.minimum(byte.to(tl.int32), 254)) << 23
    return bits.to(tl.float32, bitcast=True)


# ---- FP8 ------------------------------------------------------------------------------------------------------------


@triton.jit
def e4m3_round(x):
    """float32, |x| <= 448 or NaN -> the nearest e4m3 value as float32, ties to even."""
    if INTERPRET:
        # Adding 1.5 * 2^23 steps leaves a whole number of steps. A step is 2^-3 of the binade, never below 2^-9.
        binade = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 121)
        big = ((binade + 20) << 23 | 0x400000).to(tl.float32, bitcast=True)
        out = (x + big) - big
        out = tl.where(x == x, out, float("nan"))
    else:
        out = x.to(tl.float8e4nv).to(tl.float32)
    return out


@triton.jit
def e4m3_encode(x):
    """float32, |x| <= 448 or NaN -> e4m3 byte as uint8, nearest even. NaN is 0x7F."""
    if INTERPRET:
        # In units of 2^120 the three highest significand bits and the exponent lie where float32 has them.
        bits = magnitude_bits(e4m3_round(x) * 2.0**-120) >> 20
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        out = tl.where(x == x, bits | sign, 0x7F).to(tl.uint8)
    else:
        out = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return out


@triton.jit
def e4m3_value(byte):
    """e4m3 byte as uint8 -> float32; 0x7F and 0xFF are NaN."""
    if INTERPRET:
        code = byte.to(tl.int32)
        bits = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120
        bits = tl.where((code & 0x7F) == 0x7F, float("nan"), bits)
        out = tl.where(code >= 128, -bits, bits)
    else:
        out = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return out


@triton.jit
def fp8_cast(x):
    """Tile float32 [M, K], K a multiple of 32 -> e4m3 bytes uint8 [M, K], UE8M0 bytes int32 [M, K/32]."""
    blocks = tl.reshape(x, (x.shape[0], x.shape[1] // 32, 32))
    byte = fp8_scale_byte(tl.max(magnitude_bits(blocks), axis=2))
    values = e4m3_encode(blocks * e8m0_reciprocal(byte)[:, :, None])
    return tl.reshape(values, (x.shape[0], x.shape[1])), byte


@triton.jit
def fp8_round_trip(x):
    """Tile float32 [M, K] -> what FP8/32 leaves of it, float32 [M, K]; NaN for blocks that are not finite."""
    blocks = tl.reshape(x, (x.shape[0], x.shape[1] // 32, 32))
    byte = fp8_scale_byte(tl.max(magnitude_bits(blocks), axis=2))
    values = e4m3_round(blocks * e8m0_reciprocal(byte)[:, :, None]) * e8m0_value(byte)[:, :, None]
    return tl.reshape(values, (x.shape[0], x.shape[1]))


# ---- FP4 ------------------------------------------------------------------------------------------------------------


@triton.jit
def e2m1_encode(x):
    """Scaled float32 -> e2m1 code 0..15 as int32: nearest even, saturating at 6, the sign kept for zeros too."""
    bits = magnitude_bits(x)
    # Midpoints .25 .75 1.25 1.75 2.5 3.5 5; every other one belongs to the code above it. NaN counts as the largest.
    code = (bits > 0x3E800000).to(tl.int32) + (bits >= 0x3F400000).to(tl.int32)
    code += (bits > 0x3FA00000).to(tl.int32) + (bits >= 0x3FE00000).to(tl.int32)
    code += (bits > 0x40200000).to(tl.int32) + (bits >= 0x40600000).to(tl.int32)
    code += (bits > 0x40A00000).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_value(code):
    """e2m1 code (the low four bits of any integer) -> float32."""
    code = code.to(tl.int32)
    # Exponent and significand go where float32 has them; its exponent bias is 126 greater. Code 1 is then subnormal
    # and the product with 2^126 makes it 0.5.
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def e2m1_pack(codes):
    """Codes int32 [M, K] -> bytes uint8 [M, K/2], the even channel in the low nibble."""
    low, high = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def fp4_cast(x):
    """Tile float32 [M, K], K a multiple of 32 -> e2m1 bytes uint8 [M, K/2], UE8M0 bytes int32 [M, K/32]."""
    blocks = tl.reshape(x, (x.shape[0], x.shape[1] // 32, 32))
    byte = fp4_scale_byte(tl.max(magnitude_bits(blocks), axis=2))
    codes = e2m1_encode(blocks * e8m0_reciprocal(byte)[:, :, None])
    return e2m1_pack(tl.reshape(codes, (x.shape[0], x.shape[1]))), byte


@triton.jit
def fp4_round_trip(x):
    """Tile float32 [M, K] -> what e2m1 with a UE8M0 scale per 32 channels leaves of it; NaN as in FP8."""
    blocks = tl.reshape(x, (x.shape[0], x.shape[1] // 32, 32))
    byte = fp4_scale_byte(tl.max(magnitude_bits(blocks), axis=2))
    codes = e2m1_encode(blocks * e8m0_reciprocal(byte)[:, :, None])
    return tl.reshape(e2m1_value(codes) * e8m0_value(byte)[:, :, None], (x.shape[0], x.shape[1]))


@triton.jit
def latent_cast(x):
    """Tile float32 [M, K], K a multiple of 16 -> e2m1 bytes uint8 [M, K/2], E4M3 scale bytes uint8 [M, K/16]."""
    blocks = tl.reshape(x, (x.shape[0], x.shape[1] // 16, 16))
    bits = tl.max(magnitude_bits(blocks), axis=2)
    amax = tl.where(bits >= 0x7F800000, LATENT_AMAX_CEILING, bits.to(tl.float32, bitcast=True))
    amax = tl.minimum(tl.maximum(amax, LATENT_AMAX_FLOOR), LATENT_AMAX_CEILING)
    # True divisions: a product with the reciprocal would move some exact midpoints.
    scale = e4m3_round(tl.math.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)))
    byte = tl.where(bits >= 0x7F800000, 0x7F, e4m3_encode(scale).to(tl.int32)).to(tl.uint8)
    quotient = tl.math.div_rn(blocks, tl.broadcast_to(scale[:, :, None], blocks.shape))
    codes = e2m1_encode(quotient)
    return e2m1_pack(tl.reshape(codes, (x.shape[0], x.shape[1]))), byte
