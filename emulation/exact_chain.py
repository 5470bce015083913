"""The NVFP4 tensor-core chain at matrix-product speed, with the bits of `mma.chain`.

Why it is exact. In units of 2^(e_alpha + e_beta - 8) every product of two NVFP4 values (code * block scale) is an
integer, so float64 sums of them are exact in any order while they stay below 2^53 units. One 64-step of the hardware
is then `acc = RZ24(acc + sum)`: float64 addition, then 29 fraction bits masked off. That equals the truncated
fused sum where no term loses a bit to the alignment at 2^(e_max - F). Bounds decide it for a whole matrix:

    unit = 2^(lo_a + lo_b - 8), lo = smallest exponent of a row's non-zero scales; hi = largest exponent
    size = |a| |b| (Euclidean norms) bounds every partial sum of a row pair (Cauchy-Schwarz; RZ only shrinks)
    unrounded   size <= 2^24 units: no step rounds at all, one matrix product is the answer
    lossless    max(size, 2^(hi_a + hi_b)) < 2^(F + 1) units: e_max - F never exceeds the unit, so no term is truncated
                (dead and cancelled groups included, so the undecided rules of `mma.Model` cannot matter either)

Where they do not hold, the compiled kernel of `chain_cpu` (or `mma.chain`) truncates every term.
A NaN scale makes its whole row (or column) NaN, whatever the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from quads.emulation import chain_cpu, fdpa, mma

STEP = 64
BLOCK = 16
_KEEP_24_BITS = ~((1 << 29) - 1)
_UNIT_BITS = 8  # a product's last bit is worth 2^(e_alpha + e_beta - 8)
_NO_TERM = 20  # above every exponent of a scale, so that a minimum passes it over
_TILE = 1 << 18  # outputs of a tile: two megabytes of float64


def padded(operand: mma.Operand) -> mma.Operand:
    """`operand` with K filled up with zero codes and zero scales to a multiple of 64."""
    assert operand.scales is not None
    missing = -operand.codes.shape[-1] % STEP
    if not missing:
        return operand
    pad = torch.nn.functional.pad
    return mma.Operand(pad(operand.codes, (0, missing)), pad(operand.scales, (0, missing // BLOCK)), operand.format)


@dataclass(frozen=True)
class Decoded:
    """An NVFP4 operand ready to multiply: float64 values [rows, K] and the bounds that decide which path is exact.

    size, bound: largest |row| / 2^lo and max(|row|, 2^hi) / 2^lo of all rows. nan: rows with a NaN scale [rows].
    """

    operand: mma.Operand
    values: Tensor
    size: float
    bound: float
    nan: Tensor

    @cached_property
    def rows(self) -> chain_cpu.Parts:
        """As the left operand of the compiled kernel."""
        return chain_cpu.parts(self.operand)

    @cached_property
    def columns(self) -> chain_cpu.Parts:
        """As the right operand of the compiled kernel."""
        return chain_cpu.parts(self.operand).transposed()


def decode(operand: mma.Operand) -> Decoded:
    """Decode codes [rows, K] and UE4M3 scales [rows, K/16], K a multiple of 64."""
    codes, scales = operand.codes, operand.scales
    assert scales is not None and codes.shape[-1] % STEP == 0
    magnitude = scales.int() & 0x7F
    index = (magnitude << 4).unsqueeze(-1) + codes.unflatten(-1, (-1, BLOCK))
    values = _value_table(codes.device).index_select(0, index.flatten()).view(codes.shape)
    exponent = (magnitude >> 3).clamp_(min=1).sub_(7)
    lowest = fdpa.power_of_two(torch.where(magnitude > 0, exponent, _NO_TERM).amin(-1))
    size = torch.linalg.vector_norm(values, dim=-1) * (1 + 2**-40) / lowest
    bound = torch.maximum(size, fdpa.power_of_two(exponent.amax(-1)) / lowest)
    return Decoded(operand, values, float(size.amax()), float(bound.amax()), (magnitude == 0x7F).any(-1))


@lru_cache(maxsize=4)
def _value_table(device: torch.device) -> Tensor:
    """value[scale magnitude * 16 + code], float64, exact; 0 for the NaN scale, whose rows are set apart."""
    code, scale = torch.arange(16), torch.arange(128)
    significand, exponent = fdpa.split(code, "e2m1")
    values = significand.double() * fdpa.power_of_two(exponent)
    significand, exponent = fdpa.split(scale, "ue4m3")
    scales = significand.double() * fdpa.power_of_two(exponent)
    return torch.outer(scales.nan_to_num(), values).flatten().to(device)


def path(a: Decoded, b: Decoded, model: mma.Model) -> str:
    """Which of the cases above holds: "unrounded", "lossless" or "truncating"."""
    if a.bound * b.bound >= 2.0 ** (model.fraction_bits + 1 - _UNIT_BITS):
        return "truncating"
    return "unrounded" if a.size * b.size <= 2.0 ** (24 - _UNIT_BITS) else "lossless"


def chain(a: Decoded, b: Decoded, model: mma.Model) -> Tensor:
    """FP32 accumulator [M, N] of A B^T, equal to `mma.chain(a.operand, b.operand, model)` bit for bit."""
    case = path(a, b, model)
    if case == "truncating":
        if a.values.is_cuda or chain_cpu.library() is None:
            return mma.chain(a.operand, b.operand, model).view(torch.float32)
        return chain_cpu.chain(a.rows, b.columns, model)
    result = (a.values @ b.values.mT).float() + 0.0 if case == "unrounded" else _lossless(a.values, b.values)
    bits = result.view(torch.int32)
    bits[a.nan] = fdpa.OUTPUTS[model.output].nan
    bits[:, b.nan] = fdpa.OUTPUTS[model.output].nan
    return result


def _lossless(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([_rounded_steps(rows, b) for rows in a.split(max(1, _TILE // len(b)))])


def _rounded_steps(a: Tensor, b: Tensor) -> Tensor:
    acc = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    bits = acc.view(torch.int64)
    for start in range(0, a.shape[-1], STEP):
        acc.addmm_(a[:, start : start + STEP], b[:, start : start + STEP].mT)
        bits.bitwise_and_(_KEEP_24_BITS)
    return acc.float()
