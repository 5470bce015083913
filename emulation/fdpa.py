"""Primitives of the truncated fused dot-product-add, on significands and exponents.

A number is (significand, exponent): signed significand in (-2, 2), |significand| >= 1 for a normal, subnormals not
normalised (exponent stays the format's smallest), NaN and Inf in the significand. Every routine is exact: what it
computes in float64 fits in 53 bits (a sum of 33 terms below 2^(F+2), or 5 terms below 2^(F+11), with F <= 36).

float64 rather than int64 alignment: both were measured; see docs/evidence.md, "Speed".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

CANONICAL_NAN = {"fp16": 0x7FFF, "fp32": 0x7FFFFFFF}


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


@lru_cache(maxsize=None)
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


def truncate(significand: Tensor, exponent: Tensor, top: Tensor, fraction_bits: int) -> Tensor:
    """significand * 2^exponent in units of 2^(top - fraction_bits), truncated toward zero; float64 integers."""
    return (significand.double() * power_of_two(exponent - top + fraction_bits)).trunc_()


@dataclass(frozen=True)
class Output:
    """Result format: fraction bits, smallest exponent (subnormals are kept), container, rounding."""

    fraction_bits: int
    emin: int
    container: str
    nearest: bool


OUTPUTS = {
    "rz_fp32": Output(23, -126, "fp32", False),
    "rz_e8m13": Output(13, -126, "fp32", False),
    "rne_fp16": Output(10, -14, "fp16", True),
}


def round_output(x: Tensor, name: str) -> Tensor:
    """Bits (int32 or int16) of the float64 `x` in the output format: NaN canonical, -0 to +0, overflow to Inf."""
    rule = OUTPUTS[name]
    exponent = ((x.view(torch.int64) >> 52) & 0x7FF) - 1023
    unit = (exponent.clamp(min=rule.emin) - rule.fraction_bits).clamp(max=1000)
    scaled = x * power_of_two(-unit)
    whole = scaled.round() if rule.nearest else scaled.trunc()
    value = whole * power_of_two(unit) + 0.0
    if rule.container == "fp16":
        bits = value.half().view(torch.int16)
    else:
        bits = value.float().view(torch.int32)
    return torch.where(x.isnan(), CANONICAL_NAN[rule.container], bits)
