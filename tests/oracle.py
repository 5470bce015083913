"""Exact-rational models, independent of the emulation: numbers are Fractions, every rounding is spelt out.

Slow and plain on purpose. Signs are kept beside magnitudes, so that -0 exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

E2M1_GRID = tuple(Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12))


def nearest_even(value: Fraction) -> int:
    """Integer nearest to `value` >= 0, ties to even."""
    low = value.numerator // value.denominator
    twice = 2 * (value - low)
    return low + (twice > 1 or (twice == 1 and low % 2 == 1))


def round_float(value: Fraction, mantissa_bits: int, emin: int) -> Fraction:
    """`value` >= 0 on the grid of a binary format with subnormals and no upper end."""
    if value == 0:
        return value
    exponent = emin
    while value >= Fraction(2) ** (exponent + 1):
        exponent += 1
    ulp = Fraction(2) ** (exponent - mantissa_bits)
    return nearest_even(value / ulp) * ulp


def fp32(value: Fraction) -> Fraction:
    """fl(): FP32, round to nearest even; the inputs of these tests stay below its overflow."""
    rounded = round_float(value, 23, -126)
    assert rounded < Fraction(2) ** 128
    return rounded


def e4m3_code(value: Fraction) -> int:
    """Saturating E4M3 magnitude code of `value` >= 0."""
    if value >= 448:
        return 0x7E
    rounded = round_float(value, 3, -6)
    return min(code for code in range(0x7F) if e4m3_value(code) == rounded)


def e4m3_value(code: int) -> Fraction:
    exponent, mantissa = code >> 3, code & 7
    return (
        Fraction(mantissa, 8) * Fraction(2) ** -6
        if exponent == 0
        else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
    )


def e2m1_code(value: Fraction) -> int:
    """Saturating E2M1 magnitude code of `value` >= 0: the nearest grid point, ties to the even code."""
    distances = [(abs(point - value), code % 2, code) for code, point in enumerate(E2M1_GRID)]
    return min(distances)[2]


@dataclass(frozen=True)
class Block:
    codes: list[int]
    scale: int


def outer_scale(amax: Fraction) -> Fraction:
    return fp32(amax / 2688) if amax else Fraction(1)


def quantize_block(values: Sequence[float], outer: Fraction) -> Block:
    """The contract `exact` for one block of float32 numbers: codes and scale byte."""
    magnitudes = [abs(Fraction(value)) for value in values]
    scale = e4m3_code(fp32(fp32(max(magnitudes) / 6) / outer))
    step = fp32(e4m3_value(scale) * outer)
    codes = [e2m1_code(fp32(m / step)) if step else 0 for m in magnitudes]
    negative = [str(float(value)).startswith("-") for value in values]
    return Block([code | (8 * sign) for code, sign in zip(codes, negative, strict=True)], scale)


def dequantize(code: int, scale: int, outer: Fraction) -> Fraction:
    """Q(x) = fl(fl(q * s) * g), magnitude."""
    return fp32(fp32(E2M1_GRID[code & 7] * e4m3_value(scale)) * outer)
