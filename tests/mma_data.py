"""Random and directed inputs for the tensor-core tests: raw bits, windows of exponents, one output a pair of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from quads.emulation import fdpa, mma

BITS = {"fp32": 32, "tf32": 32, "fp16": 16, "bf16": 16}


def random_codes(shape: tuple[int, ...], name: str, generator: torch.Generator) -> Tensor:
    """Random raw codes of `name` (int64; NaN and Inf included)."""
    return torch.randint(0, 1 << BITS.get(name, fdpa.FIELDS[name].bits), shape, generator=generator)


def window_codes(shape: tuple[int, ...], name: str, width: int, generator: torch.Generator) -> Tensor:
    """Codes with exponents within `width` binades of 1 where the format has them, one in sixteen zero."""
    field = fdpa.FIELDS[name]
    code = random_codes(shape, name, generator) >> field.shift
    top = (1 << field.exponent_bits) - 1 - (field.special != "none")
    exponent = (field.bias + torch.randint(-width, width + 1, shape, generator=generator)).clamp(0, top)
    mantissa = code & ((1 << field.mantissa_bits) - 1)
    sign = (code >> (field.bits - 1) & 1) << (field.bits - 1)
    live = torch.randint(0, 16, shape, generator=generator) > 0
    return (sign | torch.where(live, exponent << field.mantissa_bits | mantissa, 0)) << field.shift


def signed(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes as the int32 or int16 bit patterns that `mma` takes for C."""
    dtype = torch.int32 if bits == 32 else torch.int16
    return torch.where(codes >= 1 << (bits - 1), codes - (1 << bits), codes).to(dtype)


def unsigned(bits: Tensor) -> list[int]:
    """Bit patterns as non-negative integers."""
    return (bits.long() & ((1 << (8 * bits.element_size())) - 1)).flatten().tolist()


def fp4_pairs(count: int, seed: int) -> tuple[mma.Operand, mma.Operand, Tensor]:
    """`count` single outputs of one 64-step: random codes and scale bytes without NaN, finite random C.

    Half of the C have raw random bits, half lie within 2^-12 .. 2^36, where they meet the groups.
    """
    g = torch.Generator().manual_seed(seed)
    operands = []
    for _ in range(2):
        scales = torch.randint(0, 256, (count, 1, 4), generator=g)
        scales = torch.where((scales & 0x7F) == 0x7F, 0x38, scales)
        operands.append(mma.Operand(random_codes((count, 1, 64), "e2m1", g), scales))
    raw = random_codes((count, 1, 1), "fp32", g)
    raw = torch.where((raw >> 23 & 0xFF) == 0xFF, 0, raw)
    near = (raw & 0x807FFFFF) | ((127 + torch.randint(-12, 37, raw.shape, generator=g)) << 23)
    half = torch.arange(count).view(-1, 1, 1) % 2 == 0
    return operands[0], operands[1], signed(torch.where(half, raw, near), 32)
