"""Exact-rational fused dot-product-add, written apart from the emulator: plain integers and Fractions, one output.

Truncation of a term to a multiple of a quantum is integer division of magnitudes; the rounding of the sum is done on
the exact sum. NaN and Inf are left to the other witnesses (mmasim, hardware words): every input here is finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tests.oracle import nearest_even

LAYOUT = {  # exponent bits, mantissa bits
    "e2m1": (2, 1),
    "e3m2": (3, 2),
    "e2m3": (2, 3),
    "e4m3": (4, 3),
    "e5m2": (5, 2),
    "fp16": (5, 10),
    "bf16": (8, 7),
    "tf32": (8, 10),
    "fp32": (8, 23),
}


@dataclass(frozen=True)
class Rules:
    """What one fused step does: the numbers are those of the reference table, not read from the emulator's."""

    group: int
    fraction_bits: int
    zero_exponent: int
    round_sum: Callable[[Fraction], int]
    dead_excluded: bool = True
    cancelled_included: bool = True


def number(code: int, name: str) -> tuple[Fraction, int]:
    """(significand with sign, exponent) of a finite code; subnormals keep the smallest exponent."""
    if name == "tf32":
        code >>= 13
    exponent_bits, mantissa_bits = LAYOUT[name]
    bias = 2 ** (exponent_bits - 1) - 1
    mantissa, exponent = code % 2**mantissa_bits, code // 2**mantissa_bits % 2**exponent_bits
    significand = Fraction(mantissa, 2**mantissa_bits) + (1 if exponent else 0)
    return (-significand if code >> (exponent_bits + mantissa_bits) & 1 else significand), max(exponent, 1) - bias


def ue4m3(byte: int) -> tuple[Fraction, int]:
    """A block scale, its sign bit ignored."""
    return number(byte & 0x7F, "e4m3")


def ue8m0(byte: int) -> tuple[Fraction, int]:
    """A power-of-two block scale."""
    return Fraction(1), byte - 127


def terms_of_groups(
    a: Sequence[int], b: Sequence[int], scales: Sequence[tuple[int, int]], rules: Rules, scale: Callable = ue4m3
) -> list[tuple[Fraction, int]]:
    """(value / 2^exponent, exponent) of each FP4 group; `scales` holds one (A, B) pair of bytes per group."""
    terms = []
    for g, (byte_a, byte_b) in enumerate(scales):
        part = slice(g * rules.group, (g + 1) * rules.group)
        values = [[s * Fraction(2) ** e for s, e in (number(c, "e2m1") for c in x[part])] for x in (a, b)]
        products = [x * y for x, y in zip(*values, strict=True)]
        (scale_a, exponent_a), (scale_b, exponent_b) = scale(byte_a), scale(byte_b)
        dead = not any(products) or scale_a * scale_b == 0
        cancelled = not dead and sum(products) == 0
        exponent = exponent_a + exponent_b
        if (dead and rules.dead_excluded) or (cancelled and not rules.cancelled_included):
            exponent = rules.zero_exponent
        terms.append((sum(products) * scale_a * scale_b, exponent))
    return terms


def terms_of_products(a: Sequence[int], b: Sequence[int], name: str, rules: Rules) -> list[tuple[Fraction, int]]:
    """(significand, exponent) of each product: exponents add, significands are not normalised."""
    terms = []
    for code_a, code_b in zip(a, b, strict=True):
        (significand_a, exponent_a), (significand_b, exponent_b) = number(code_a, name), number(code_b, name)
        significand = significand_a * significand_b
        terms.append((significand, exponent_a + exponent_b if significand else rules.zero_exponent))
    return terms


def fused_step(terms: list[tuple[Fraction, int]], c: int, rules: Rules, container: str = "fp32") -> int:
    """Bits of the rounded sum of the truncated terms and C."""
    significand, exponent = number(c, container)
    terms = [*terms, (significand, exponent if significand else rules.zero_exponent)]
    quantum = Fraction(2) ** (max(e for _, e in terms) - rules.fraction_bits)
    total = sum((truncated(s * Fraction(2) ** e, quantum) for s, e in terms), Fraction(0))
    return rules.round_sum(total)


def truncated(value: Fraction, quantum: Fraction) -> Fraction:
    """Toward zero to a multiple of `quantum`."""
    units = abs(value) // quantum
    return units * quantum if value >= 0 else -units * quantum


def to_float(value: Fraction, fraction_bits: int, emin: int, emax: int, width: int, nearest: bool) -> int:
    """Bits of `value` in a binary format: RNE or toward zero, subnormals kept, overflow to Inf, zero positive."""
    magnitude = abs(value)
    if magnitude == 0:
        return 0
    exponent = max(_floor_log2(magnitude), emin)
    quantum = Fraction(2) ** (exponent - fraction_bits)
    units = nearest_even(magnitude / quantum) if nearest else int(magnitude // quantum)
    code = units + ((exponent - emin) << fraction_bits)
    code = min(code, (emax - emin + 2) << fraction_bits)
    return (code | (1 << (width - 1)) if value < 0 else code) if code else 0


def _floor_log2(magnitude: Fraction) -> int:
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return exponent if magnitude >= Fraction(2) ** exponent else exponent - 1


def rz_fp32(value: Fraction) -> int:
    return to_float(value, 23, -126, 127, 32, nearest=False)


def rn_fp32(value: Fraction) -> int:
    return to_float(value, 23, -126, 127, 32, nearest=True)


def rz_e8m13(value: Fraction) -> int:
    """13 fraction bits, left-aligned in an FP32 container."""
    code = to_float(value, 13, -126, 127, 22, nearest=False)
    return (code << 10) & 0xFFFFFFFF


def rne_fp16(value: Fraction) -> int:
    return to_float(value, 10, -14, 15, 16, nearest=True)


NVFP4 = Rules(16, 35, -139, rz_fp32)
TABLE = {  # model: (rules, operand format, K of a step, container of C)
    "tcgen05_f16": (Rules(1, 25, -133, rz_fp32), "bf16", 16, "fp32"),
    "tcgen05_tf32": (Rules(1, 25, -133, rz_fp32), "tf32", 8, "fp32"),
    "tcgen05_f8f6f4": (Rules(1, 25, -133, rz_fp32), "e3m2", 32, "fp32"),
    "wgmma_f16": (Rules(1, 25, -133, rz_fp32), "bf16", 16, "fp32"),
    "wgmma_f16_f16": (Rules(1, 25, -21, rne_fp16), "fp16", 16, "fp16"),
    "wgmma_tf32": (Rules(1, 25, -133, rz_fp32), "tf32", 8, "fp32"),
    "wgmma_fp8": (Rules(1, 13, -133, rz_e8m13), "e4m3", 32, "fp32"),
    "wgmma_fp8_f16": (Rules(1, 13, -21, rne_fp16), "e5m2", 32, "fp16"),
    "hopper_mma_f16": (Rules(1, 25, -133, rz_fp32), "fp16", 16, "fp32"),
    "ada_mma_fp8": (Rules(1, 13, -132, rz_e8m13), "e4m3", 16, "fp32"),
    "ampere_mma_f16": (Rules(1, 24, -132, rz_fp32), "bf16", 8, "fp32"),
    "volta_mma_f16": (Rules(1, 23, -131, rz_fp32), "fp16", 4, "fp32"),
}
