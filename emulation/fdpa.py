"""Primitives of the truncated fused dot-product-add, on significands and exponents.

An operand is (significand, exponent): signed significand in (-2, 2), |significand| >= 1 for a normal, subnormals not
normalised (exponent stays the format's smallest), NaN and Inf in the significand. A term of the sum is its float64
value beside the exponent that the hardware aligns by. All is exact: in units of 2^(top - F) a sum is an integer
below 33 * 2^(F+2) (T-FDPA, F <= 25) or 5 * 2^(F+11) (groups of 16, F <= 36), and float64 holds 2^53.

float64 rather than int64: to align and add 4 x 128 x 128 terms took 0.13 ms in float64 and 0.42 ms in int64 (measured,
torch 2.13, one thread of an AMD EPYC), where int64 needs shifts both ways and the sign apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """How the hardware reads an operand: exponent and mantissa bits, and which codes are not numbers.

    special: "ieee" (Inf and NaN at the largest exponent), "nan" (only the all-ones code), "none".
    shift: container bits below the operand that are ignored (tf32 in an FP32 container).
    """

    exponent_bits: int
    mantissa_bits: int
    special: str
    signed: bool = True
    shift: int = 0

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits


FIELDS = {
    "e2m1": Field(2, 1, "none"),
    "e3m2": Field(3, 2, "none"),
    "e2m3": Field(2, 3, "none"),
    "e4m3": Field(4, 3, "nan"),
    "e5m2": Field(5, 2, "ieee"),
    "bf16": Field(8, 7, "ieee"),
    "fp16": Field(5, 10, "ieee"),
    "tf32": Field(8, 10, "ieee", shift=13),
    "fp32": Field(8, 23, "ieee"),
    "ue4m3": Field(4, 3, "nan", signed=False),
}


def split(codes: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """(significand float32, exponent int32) of integer `codes` of format `name`, any shape."""
    if name == "ue8m0":
        code = codes.int() & 0xFF
        return torch.where(code == 0xFF, torch.nan, 1.0), code - 127
    if FIELDS[name].bits <= 8:
        index = (codes.flatten() & (2 ** FIELDS[name].bits - 1)).int()
        significand, exponent = (part.index_select(0, index) for part in _table(name, codes.device))
        return significand.view(codes.shape), exponent.view(codes.shape)
    return _split(codes, FIELDS[name])


@cache
def _table(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    return _split(torch.arange(1 << FIELDS[name].bits, device=device), FIELDS[name])


def _split(codes: Tensor, field: Field) -> tuple[Tensor, Tensor]:
    code = codes.long() >> field.shift
    top = (1 << field.exponent_bits) - 1
    exponent = (code >> field.mantissa_bits) & top
    mantissa = code & ((1 << field.mantissa_bits) - 1)
    integer = mantissa + ((exponent > 0).long() << field.mantissa_bits)
    significand = integer.float() * 2.0**-field.mantissa_bits
    if field.special == "ieee":
        significand = torch.where(exponent == top, torch.where(mantissa == 0, torch.inf, torch.nan), significand)
    if field.special == "nan":
        all_ones = (exponent == top) & (mantissa == (1 << field.mantissa_bits) - 1)
        significand = torch.where(all_ones, torch.nan, significand)
    if field.signed:
        negative = (code >> (field.bits - 1)) & 1 == 1
        significand = torch.where(negative, -significand, significand)
    return significand, (exponent.clamp(min=1) - field.bias).int()


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, exact, for integer exponents in [-1022, 1023] (library exp2 need not be)."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def exponent_of(x: Tensor, smallest: int, largest: int) -> Tensor:
    """floor(log2 |x|) of float64 `x` as int64, clamped: zero and subnormals to `smallest`, Inf and NaN to `largest`."""
    return (((x.view(torch.int64) >> 52) & 0x7FF) - 1023).clamp_(smallest, largest)


@dataclass(frozen=True)
class Output:
    """Result format: fraction bits, smallest exponent (subnormals are kept), container, rounding."""

    fraction_bits: int
    emin: int
    emax: int
    dtype: torch.dtype
    integer: torch.dtype
    nan: int
    nearest: bool


OUTPUTS = {
    "rz_fp32": Output(23, -126, 127, torch.float32, torch.int32, 0x7FFFFFFF, False),
    "rz_e8m13": Output(13, -126, 127, torch.float32, torch.int32, 0x7FFFFFFF, False),
    "rne_fp16": Output(10, -14, 15, torch.float16, torch.int16, 0x7FFF, True),
}


def fused_sum(values: Tensor, exponents: Tensor, c: Tensor, rule: Output, fraction_bits: int, zero: int) -> Tensor:
    """round(sum of the truncated terms): `values` float64 [T, ...] and their `exponents`, C in the output's dtype.

    Each term is truncated toward zero to a multiple of 2^(top - F), top the largest exponent; the sum is exact.
    """
    value_c = c.double()
    exponent_c = torch.where(value_c == 0, zero, exponent_of(value_c, rule.emin, rule.emax + 1))
    top = torch.maximum(exponents.amax(dim=0), exponent_c)
    scale = power_of_two(fraction_bits - top)
    total = (values * scale).trunc_().sum(dim=0) + (value_c * scale).trunc_()
    return round_to(total * power_of_two(top - fraction_bits), rule)


def round_to(x: Tensor, rule: Output) -> Tensor:
    """float64 `x` in the output format and dtype: subnormals kept, overflow to Inf, -0 to +0."""
    unit = (exponent_of(x, rule.emin, rule.emax) - rule.fraction_bits).long()
    scaled = x * power_of_two(-unit)
    whole = scaled.round_() if rule.nearest else scaled.trunc_()
    return whole.mul_(power_of_two(unit)).to(rule.dtype) + 0.0


def to_bits(x: Tensor, rule: Output) -> Tensor:
    """Bit patterns of an output tensor, NaN canonical."""
    return torch.where(x.isnan(), rule.nan, x.view(rule.integer))
