"""Number formats as data, with encode, decode and round.

NaN: a format with a NaN encodes it; E2M1 has none and takes NaN to +6 (0x7), as ``cvt.rn.satfinite.e2m1x2``.
Inf and overflow: saturate to the largest finite value, or (``saturate=False``) take the format's Inf or NaN code.
-0 keeps its sign bit. Subnormals are kept, never flushed.
Sources: OCP Microscaling Formats v1.0 (E2M1, E8M0), OCP 8-bit floating point v1.0 (E4M3, E5M2), PTX ISA cvt.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary floating-point format: sign, exponent field, mantissa field, and its special codes."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int  # magnitude code of the largest finite value
    nan_code: int  # magnitude code that NaN is encoded as
    overflow_code: int  # magnitude code that overflow takes when it does not saturate

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal, and of every subnormal."""
        return 1 - self.bias


E2M1 = Format(name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max_code=0x7, nan_code=0x7, overflow_code=0x7)
E4M3 = Format(
    name="e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max_code=0x7E, nan_code=0x7F, overflow_code=0x7F
)

E2M1_MAX = 6.0
E4M3_MAX = 448.0


@lru_cache(maxsize=None)
def _magnitudes(fmt: Format) -> Tensor:
    codes = torch.arange(1 << (fmt.bits - 1))
    exponent = codes >> fmt.mantissa_bits
    mantissa = codes & ((1 << fmt.mantissa_bits) - 1)
    significand = mantissa + ((exponent > 0).long() << fmt.mantissa_bits)
    value = torch.ldexp(significand.double(), exponent.clamp(min=1) - fmt.bias - fmt.mantissa_bits)
    value[codes > fmt.max_code] = torch.nan
    return torch.cat([value, -value]).float()


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Values of `codes` (integers, any shape) as float32. Exact."""
    return _magnitudes(fmt).to(codes.device)[codes.long()]


def encode(x: Tensor, fmt: Format, *, saturate: bool = True) -> Tensor:
    """Codes (uint8, same shape) of `x` (float32, bfloat16 or float16), round to nearest, ties to even."""
    value = x.float()
    magnitude = value.double().abs()
    nan = magnitude.isnan()
    exponent = torch.where(magnitude > 0, torch.frexp(magnitude).exponent - 1, fmt.emin).clamp(fmt.emin, 128)
    significand = torch.ldexp(magnitude, fmt.mantissa_bits - exponent).round()
    finite = magnitude.isfinite()
    code = torch.where(finite, significand, 0).long() + ((exponent.long() - fmt.emin) << fmt.mantissa_bits)
    overflow = ~finite | (code > fmt.max_code)
    code = torch.where(overflow, fmt.max_code if saturate else fmt.overflow_code, code)
    code = torch.where(nan, fmt.nan_code, code)
    sign = torch.signbit(value) & ~(nan & (fmt.nan_code == fmt.max_code))
    return (code | (sign.long() << (fmt.bits - 1))).to(torch.uint8)
