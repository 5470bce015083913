"""Number formats as data, with encode, decode and round.

NaN: a format with a NaN encodes it; E2M1 has none and takes NaN to +6 (0x7), as ``cvt.rn.satfinite.e2m1x2``.
Inf and overflow: saturate to the largest finite value, or (``saturate=False``) take the format's Inf or NaN code;
rounding toward zero then stops a finite input at the largest finite value, as IEEE 754 has it.
-0 keeps its sign bit. Subnormals are kept, never flushed. Codes of a signed format carry the sign in their top bit.
UE4M3 is E4M3 as the tensor core reads a block scale: bit 7 is ignored. E8M0 has neither sign nor zero: code 0 is
2^-127, which zero and everything below takes, and a negative number is NaN.
Sources: OCP Microscaling Formats v1.0 (E2M1, E8M0), OCP 8-bit floating point v1.0 (E4M3, E5M2), IEEE 754 (FP16),
PTX ISA cvt and mma (BF16, TF32, UE4M3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from quads.emulation.rounding import Rounding, round_magnitude


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
    sign: Literal["kept", "ignored", "nan"] = "kept"  # what becomes of a negative number
    subnormals: bool = True  # whether exponent field 0 holds zero and subnormals

    @property
    def bits(self) -> int:
        return (self.sign == "kept") + self.exponent_bits + self.mantissa_bits

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal, and of every subnormal."""
        return int(self.subnormals) - self.bias

    @property
    def max(self) -> float:
        return float(_magnitudes(self)[self.max_code])


E2M1 = Format(name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max_code=0x7, nan_code=0x7, overflow_code=0x7)
E4M3 = Format(name="e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max_code=0x7E, nan_code=0x7F, overflow_code=0x7F)
UE4M3 = Format(
    name="ue4m3",
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    max_code=0x7E,
    nan_code=0x7F,
    overflow_code=0x7F,
    sign="ignored",
)
E5M2 = Format(name="e5m2", exponent_bits=5, mantissa_bits=2, bias=15, max_code=0x7B, nan_code=0x7F, overflow_code=0x7C)
E8M0 = Format(
    name="e8m0",
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    max_code=0xFE,
    nan_code=0xFF,
    overflow_code=0xFF,
    sign="nan",
    subnormals=False,
)
BF16 = Format(
    name="bf16",
    exponent_bits=8,
    mantissa_bits=7,
    bias=127,
    max_code=0x7F7F,
    nan_code=0x7FFF,
    overflow_code=0x7F80,
)
FP16 = Format(
    name="fp16",
    exponent_bits=5,
    mantissa_bits=10,
    bias=15,
    max_code=0x7BFF,
    nan_code=0x7FFF,
    overflow_code=0x7C00,
)
TF32 = Format(  # 19 bits: the upper bits of the FP32 register that holds it
    name="tf32",
    exponent_bits=8,
    mantissa_bits=10,
    bias=127,
    max_code=0x3FBFF,
    nan_code=0x3FFFF,
    overflow_code=0x3FC00,
)

FORMATS = {fmt.name: fmt for fmt in (E2M1, E4M3, UE4M3, E5M2, E8M0, BF16, FP16, TF32)}

E2M1_MAX = 6.0
E4M3_MAX = 448.0

_FP32_MANTISSA = 23
_FP32_BIAS = 127
_FP32_MAGNITUDE = 0x7FFFFFFF
_FP32_INF = 0x7F800000


@cache
def _magnitudes(fmt: Format) -> Tensor:
    codes = torch.arange(1 << (fmt.exponent_bits + fmt.mantissa_bits))
    exponent = codes >> fmt.mantissa_bits
    mantissa = codes & ((1 << fmt.mantissa_bits) - 1)
    normal = (exponent > 0) if fmt.subnormals else torch.ones_like(exponent, dtype=torch.bool)
    significand = mantissa + (normal.long() << fmt.mantissa_bits)
    power = exponent.clamp(min=int(fmt.subnormals)) - fmt.bias - fmt.mantissa_bits
    value = significand.double() * torch.exp2(power.double())
    value[codes > fmt.max_code] = torch.nan
    if fmt.overflow_code not in (fmt.nan_code, fmt.max_code):
        value[fmt.overflow_code] = torch.inf
    return value.float()


@cache
def _values(fmt: Format) -> Tensor:
    return torch.cat([_magnitudes(fmt), -_magnitudes(fmt)]) if fmt.sign == "kept" else _magnitudes(fmt)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Values of `codes` (integers, any shape) as float32. Exact. Bits above the format's are ignored."""
    index = codes.int() & ((1 << fmt.bits) - 1)
    return _values(fmt).to(codes.device).index_select(0, index.flatten()).view(codes.shape)  # a third of `[]`


def encode(
    x: Tensor,
    fmt: Format,
    *,
    saturate: bool = True,
    rounding: Rounding = "rne",
    random_bits: Tensor | None = None,
    random_width: int = 8,
) -> Tensor:
    """Codes (uint8, or int32 for wider formats; same shape) of `x` (float32, bfloat16 or float16).

    `random_bits` (integers, same shape, `random_width` bits each) belong to the stochastic rounding `rs`.
    The two formats that quantisers meet in bulk take a short cut in FP32 bits, which the tests hold to the
    definition bit for bit.
    """
    if rounding == "rne" and saturate and fmt in (E2M1, E4M3) and random_bits is None:
        return _encode_bits(x.float(), fmt)
    return encode_by_definition(
        x, fmt, saturate=saturate, rounding=rounding, random_bits=random_bits, random_width=random_width
    )


def encode_by_definition(
    x: Tensor,
    fmt: Format,
    *,
    saturate: bool = True,
    rounding: Rounding = "rne",
    random_bits: Tensor | None = None,
    random_width: int = 8,
) -> Tensor:
    """`encode`, written as the formats define it, in float64: the readable twin."""
    magnitude = x.double().abs()
    finite = magnitude.isfinite()
    magnitude_or_0 = torch.where(finite, magnitude, 0.0)
    exponent = torch.where(magnitude_or_0 > 0, torch.frexp(magnitude_or_0).exponent - 1, fmt.emin)
    exponent = exponent.clamp(min=fmt.emin)
    scaled = magnitude_or_0 * torch.exp2((fmt.mantissa_bits - exponent).double())
    significand = round_magnitude(
        scaled, torch.signbit(x), rounding, random_bits=random_bits, random_width=random_width
    )
    code = significand.long() + ((exponent.long() - fmt.emin) << fmt.mantissa_bits)
    if not fmt.subnormals:
        code = (code - (1 << fmt.mantissa_bits)).clamp(min=0)
    stops = saturate or rounding == "rz"
    code = torch.where(finite & (code <= fmt.max_code), code, fmt.max_code if stops else fmt.overflow_code)
    if not saturate:
        code = torch.where(magnitude.isinf(), fmt.overflow_code, code)
    return _with_sign(code, x, fmt)


def _with_sign(code: Tensor, x: Tensor, fmt: Format) -> Tensor:
    nan = x.isnan()
    negative = torch.signbit(x)
    if fmt.sign == "nan":
        nan = nan | (x < 0)
    code = torch.where(nan, fmt.nan_code, code)
    if fmt.sign == "kept":
        nan_is_a_number = fmt.nan_code == fmt.max_code
        code = code | ((negative & ~(nan & nan_is_a_number)).long() << (fmt.bits - 1))
    return code.to(torch.uint8 if fmt.bits <= 8 else torch.int32)


def _encode_bits(value: Tensor, fmt: Format) -> Tensor:
    """Saturating RNE of FP32 `value` in its own bits, for a signed format of 8 bits at most.

    Normals: round the FP32 pattern to `mantissa_bits`, then rebase the exponent field. Subnormals: an FP32
    addition of 2^k, whose unit in the last place is the format's smallest step, does the rounding. Either
    result is too small where the other applies (the second is held at the smallest normal), so the larger is it.
    """
    shift = _FP32_MANTISSA - fmt.mantissa_bits
    rebase = (_FP32_BIAS - fmt.bias) << fmt.mantissa_bits
    step = 2.0 ** (_FP32_MANTISSA + fmt.emin - fmt.mantissa_bits)
    bits = value.view(torch.int32)
    pattern = bits & _FP32_MAGNITUDE
    nan = pattern > _FP32_INF
    pattern.clamp_(max=_pattern(fmt.max))
    subnormal = pattern.view(torch.float32).clamp(max=2.0**fmt.emin).add_(step).view(torch.int32).sub_(_pattern(step))
    odd = (pattern >> shift).bitwise_and_(1)
    code = pattern.add_(odd).add_((1 << (shift - 1)) - 1).bitwise_right_shift_(shift).sub_(rebase)
    torch.maximum(code, subnormal, out=code)
    sign = (bits >> (32 - fmt.bits)).bitwise_and_(1 << (fmt.bits - 1))
    if fmt.nan_code == fmt.max_code:
        sign.masked_fill_(nan, 0)
    else:
        code.masked_fill_(nan, fmt.nan_code)
    return code.bitwise_or_(sign).to(torch.uint8)


@cache
def _pattern(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))
