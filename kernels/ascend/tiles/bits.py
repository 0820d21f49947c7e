"""Narrow formats in 32-bit integer arithmetic, as expressions of a kernel. Vector lanes have no 8-bit stores, so bytes
are assembled into words; rounding is to nearest, ties to even, by adding 2^23."""

from __future__ import annotations

from typing import Any

import tilelang
import tilelang.ascend.language as T

# No two buffers in the same bytes. Where they may, the compiler orders the uses of each, not those of one after the
# other's: what arrives for the next round could overwrite what this round still reads.
APART = {tilelang.PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE: True}

Expr = Any  # an expression of the kernel under construction

_ROUND = 8388608.0  # 2^23: the low bits of the sum are the rounded integer


def as_int(x: Expr) -> Expr:
    return T.reinterpret(x, "int32")


def as_float(x: Expr) -> Expr:
    return T.reinterpret(x, "float32")


def power(exponent: Expr) -> Expr:
    """2^(exponent - 127), exponent 1..254."""
    return as_float(T.shift_left(exponent, 23))


def magnitude(x: Expr) -> Expr:
    """float32 without its sign; T.abs would do, but not for a NaN that an integer comparison is to see."""
    return as_float(T.bitwise_and(as_int(x), 0x7FFFFFFF))


def fp8_exponent(amax: Expr) -> Expr:
    """Exponent byte of 2^ceil(log2(amax / 448)); 448 is 1.75 x 2^8. 255 where amax is not finite."""
    bits = as_int(amax)
    return T.if_then_else(bits >= 0x7F800000, 255, T.shift_right(bits + 0x1FFFFF, 23) - 8)


def fp4_exponent(amax: Expr) -> Expr:
    """Exponent byte of 2^ceil(log2(amax / 6)); 6 is 1.5 x 2^2. 255 where amax is not finite."""
    bits = as_int(amax)
    return T.if_then_else(bits >= 0x7F800000, 255, T.shift_right(bits + 0x3FFFFF, 23) - 2)


def inverse(exponent: Expr) -> Expr:
    """1 / 2^(exponent - 127); of the NaN byte, 0."""
    return as_float(T.if_then_else(exponent >= 255, 0, T.shift_left(254 - exponent, 23)))


def e4m3(x: Expr) -> Expr:
    """Byte of a float32 of magnitude 448 or less."""
    bits = as_int(x)
    plain = T.bitwise_and(bits, 0x7FFFFFFF)
    exponent = T.max(T.shift_right(plain, 23), 121)  # of the smallest normal: 2^-6
    eighths = T.bitwise_and(as_int(as_float(plain) * power(257 - exponent) + T.float32(_ROUND)), 31)
    return T.bitwise_or(T.shift_left(exponent - 121, 3) + eighths, T.bitwise_and(T.shift_right(bits, 24), 128))


def e4m3_value(byte: Expr) -> Expr:
    """float32 of a byte 0..255."""
    exponent = T.bitwise_and(T.shift_right(byte, 3), 15)
    mantissa = T.bitwise_and(byte, 7)
    sign = T.shift_left(T.bitwise_and(byte, 128), 24)
    normal = as_float(T.bitwise_or(T.shift_left(exponent + 120, 23), T.bitwise_or(T.shift_left(mantissa, 20), sign)))
    small = T.cast(mantissa, "float32") * T.float32(2.0**-9)
    # Asked of the byte: the compiler reasons about the shifted bit as if 32 bits could not overflow.
    signed = T.if_then_else(T.bitwise_and(byte, 128) != 0, -small, small)
    finite = T.if_then_else(exponent == 0, signed, normal)
    # Not a constant: the compiler would take its address.
    return T.if_then_else(T.bitwise_and(byte, 127) == 127, as_float(T.bitwise_or(sign, 0x7FC00000)), finite)


def e8m0_value(byte: Expr) -> Expr:
    """float32 of a byte 0..255: 0 is 2^-127, 255 NaN."""
    bits = T.if_then_else(byte == 0, 0x400000, T.if_then_else(byte == 255, 0x7FC00000, T.shift_left(byte, 23)))
    return as_float(bits)


@T.macro
def bytes_to_words(values, words, first, count):
    """Bytes 0..255, an int32 each, four to a word: ``count`` words from ``words[first]`` on, little end first."""
    for w in T.Parallel(count):
        word = T.alloc_var(T.int32)
        word = 0
        for i in T.serial(4):
            word = T.bitwise_or(word, T.shift_left(values[w * 4 + i], 8 * i))
        words[first + w] = word


def e2m1(x: Expr) -> Expr:
    """4-bit code of a scaled float32; a midpoint belongs to the even code, beyond 6 saturates."""
    m = magnitude(x)
    code = T.cast(m > T.float32(0.25), "int32")
    for boundary, inclusive in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code = code + T.cast(m >= T.float32(boundary) if inclusive else m > T.float32(boundary), "int32")
    return T.bitwise_or(code, T.bitwise_and(T.shift_right(as_int(x), 28), 8))


def e2m1_value(code: Expr) -> Expr:
    """float32 of a 4-bit code 0..15."""
    low = T.bitwise_and(code, 7)
    # From 1 on one bit of mantissa; below, 0 and a half.
    normal = as_float(
        T.bitwise_or(T.shift_left(T.shift_right(low, 1) + 126, 23), T.shift_left(T.bitwise_and(low, 1), 22))
    )
    plain = T.if_then_else(low < 2, T.cast(low, "float32") * T.float32(0.5), normal)
    return T.if_then_else(T.bitwise_and(code, 8) != 0, -plain, plain)
