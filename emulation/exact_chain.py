"""The NVFP4 tensor-core chain at matrix-product speed, with the bits of `mma.chain`.

Why it is exact. In units of 2^(e_alpha + e_beta - 8) every product of two NVFP4 values (code * block scale) is an
integer, so float64 sums of them are exact in any order while they stay below 2^53 units. One 64-step of the hardware
is then `acc = RZ24(acc + sum)`: float64 addition, then 29 fraction bits masked off. That equals the truncated
fused sum where no term loses a bit to the alignment at 2^(e_max - 35). Three cases, decided by bounds:

    unit = 2^(lo_a + lo_b - 8), lo = smallest exponent of a row's non-zero scales; hi = largest exponent
    size = |a| |b| (Euclidean norms) bounds every partial sum of a row pair (Cauchy-Schwarz; RZ only shrinks)
    unrounded   size <= 2^24 units: no step rounds at all, one matrix product is the answer
    lossless    max(size, 2^(hi_a + hi_b)) < 2^36 units: e_max - 35 never exceeds the unit, so no term is truncated
                (dead and cancelled groups included, so the undecided rules of `mma.Model` cannot matter either)
    checked     otherwise each step's outputs are classed: lossless, or further from the next FP32 boundary than five
                truncations can reach; the rest is run through `mma.step`, and through `mma.chain` where that differs

A NaN scale makes its whole row (or column) NaN, whatever the codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from quads.emulation import fdpa, mma

STEP = 64
BLOCK = 16
_KEEP_24_BITS = ~((1 << 29) - 1)
_LOW_BITS = (1 << 29) - 1
_UNIT_BITS = 8  # a product's last bit is worth 2^(e_alpha + e_beta - 8)
_NO_TERM = 20  # above every exponent of a scale, so that a minimum passes it over
_TILE = {"cpu": 1 << 18, "cuda": 1 << 26}  # float64 elements of a tile's largest tensor: a cache, or a launch, full
_PAIRS = 1 << 14  # pairs a call of the slow model


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

    live: exponents int8 [rows, steps, 4] of the block scales, _NO_TERM where the scale is zero; exponent: of all.
    norm_ratio, ratio: |row| / 2^lo and max(|row|, 2^hi) / 2^lo, [rows]. nan: rows with a NaN scale.
    """

    operand: mma.Operand
    values: Tensor
    live: Tensor
    exponent: Tensor
    norm_ratio: Tensor
    ratio: Tensor
    nan: Tensor

    def rows(self, index: Tensor | slice) -> Decoded:
        """The rows `index`."""
        tensors = (self.values, self.live, self.exponent, self.norm_ratio, self.ratio, self.nan)
        return Decoded(self.operand.rows(index), *(x[index] for x in tensors))


def decode(operand: mma.Operand) -> Decoded:
    """Decode codes [rows, K] and UE4M3 scales [rows, K/16], K a multiple of 64."""
    codes, scales = operand.codes, operand.scales
    assert scales is not None and codes.shape[-1] % STEP == 0
    magnitude = scales.int() & 0x7F
    index = (magnitude << 4).unsqueeze(-1) + codes.unflatten(-1, (-1, BLOCK)).int()
    values = _value_table(codes.device).index_select(0, index.flatten()).view(codes.shape)
    exponent = ((magnitude >> 3).clamp(min=1) - 7).to(torch.int8)
    live = torch.where(magnitude > 0, exponent, _NO_TERM)
    lowest = fdpa.power_of_two(live.amin(-1))
    norm_ratio = torch.linalg.vector_norm(values, dim=-1) * (1 + 2**-40) / lowest
    ratio = torch.maximum(norm_ratio, fdpa.power_of_two(exponent.amax(-1)) / lowest)
    steps = (-1, STEP // BLOCK)
    nan = (magnitude == 0x7F).any(-1)
    return Decoded(operand, values, live.unflatten(-1, steps), exponent.unflatten(-1, steps), norm_ratio, ratio, nan)


@lru_cache(maxsize=4)
def _value_table(device: torch.device) -> Tensor:
    """value[scale magnitude * 16 + code], float64, exact; 0 for the NaN scale, whose rows are set apart."""
    code, scale = torch.arange(16), torch.arange(128)
    significand, exponent = fdpa.split(code, "e2m1")
    values = significand.double() * fdpa.power_of_two(exponent)
    significand, exponent = fdpa.split(scale, "ue4m3")
    scales = significand.double() * fdpa.power_of_two(exponent)
    return torch.outer(scales.nan_to_num(), values).flatten().to(device)


def chain(a: Decoded, b: Decoded, model: mma.Model) -> Tensor:
    """FP32 accumulator [M, N] of A B^T, equal to `mma.chain(a.operand, b.operand, model)` bit for bit."""
    if bool(a.nan.any() | b.nan.any()):
        return _around_nan(a, b, model)
    tile = _TILE[a.values.device.type]
    ratio = float(a.ratio.amax() * b.ratio.amax())
    lossless = ratio < 2.0 ** (model.fraction_bits + 1 - _UNIT_BITS)
    if lossless and float(a.norm_ratio.amax() * b.norm_ratio.amax()) <= 2.0 ** (24 - _UNIT_BITS):
        return (a.values @ b.values.mT).float() + 0.0
    if lossless:
        return _by_rows(_lossless_chain, a, b, model, tile // len(b.nan))
    if ratio < 2.0 ** (53 - _UNIT_BITS):
        return _by_rows(_checked_chain, a, b, model, tile // (len(b.nan) * a.live.shape[1]))
    return mma.chain(a.operand, b.operand, model).view(torch.float32)


def _around_nan(a: Decoded, b: Decoded, model: mma.Model) -> Tensor:
    result = torch.full((len(a.nan), len(b.nan)), fdpa.OUTPUTS["rz_fp32"].nan, device=a.nan.device, dtype=torch.int32)
    rows, columns = (~a.nan).nonzero().squeeze(-1), (~b.nan).nonzero().squeeze(-1)
    if len(rows) and len(columns):
        finite = chain(a.rows(rows), b.rows(columns), model)
        result[rows.unsqueeze(-1), columns] = finite.view(torch.int32)
    return result.view(torch.float32)


def _by_rows(
    part: Callable[[Decoded, Decoded, mma.Model], Tensor], a: Decoded, b: Decoded, model: mma.Model, rows: int
) -> Tensor:
    stride = max(rows, 8)
    if stride >= len(a.nan):
        return part(a, b, model)
    return torch.cat([part(a.rows(slice(i, i + stride)), b, model) for i in range(0, len(a.nan), stride)])


def _lossless_chain(a: Decoded, b: Decoded, model: mma.Model) -> Tensor:
    acc = torch.zeros(len(a.nan), len(b.nan), dtype=torch.float64, device=a.values.device)
    bits = acc.view(torch.int64)
    for start in range(0, a.values.shape[-1], STEP):
        acc.addmm_(a.values[:, start : start + STEP], b.values[:, start : start + STEP].mT)
        bits.bitwise_and_(_KEEP_24_BITS)
    return acc.float()


def _checked_chain(a: Decoded, b: Decoded, model: mma.Model) -> Tensor:
    sums = torch.bmm(_by_step(a.values), _by_step(b.values).mT)
    before = torch.empty(len(sums) + 1, *sums.shape[1:], dtype=torch.float64, device=sums.device)
    before[0] = 0
    for s in range(len(sums)):
        sums[s] += before[s]
        torch.bitwise_and(sums[s].view(torch.int64), _KEEP_24_BITS, out=before[s + 1].view(torch.int64))
    result = before[-1].float() + 0.0
    where = _doubtful(sums, before[:-1], a, b, model.fraction_bits).nonzero()
    for batch in where.split(_PAIRS):
        _settle(result, batch, before, a, b, model)
    return result


def _doubtful(exact: Tensor, before: Tensor, a: Decoded, b: Decoded, fraction_bits: int) -> Tensor:
    """Steps [S, M, N] where a truncated term could have changed the bits: `exact` is the sum before its rounding.

    A term loses bits only if its last bit is below 2^(top - F). Five losses stay below 5 * 2^(top - F), so the bits
    are safe where the tail of `exact` below its 24 bits is further than that from both neighbouring boundaries.
    """
    low, high = _outer(a.live, b.live).amin(0), _outer(a.exponent, b.exponent).amax(0)
    exponent_c, exponent_sum = _exponent(before), _exponent(exact)
    top = torch.maximum(high, exponent_c)
    losing = (low - _UNIT_BITS < top - fraction_bits) | (exponent_c - 23 < top - fraction_bits) & (exponent_c > -1023)
    tail = exact.view(torch.int32)[..., 0::2] & _LOW_BITS
    tail = torch.minimum(tail, _LOW_BITS + 1 - tail)  # in units of 2^(exponent_sum - 52)
    reach = (top - exponent_sum + (52 - fraction_bits)).clamp_(0, 31).int()
    return losing & (tail >> reach < 5)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Sums of exponents, int8 [4, S, M, N]."""
    return a.permute(2, 1, 0).contiguous().unsqueeze(-1) + b.permute(2, 1, 0).contiguous().unsqueeze(-2)


def _exponent(x: Tensor) -> Tensor:
    """floor(log2 |x|) of float64 as int16; -1023 for zero."""
    return ((x.view(torch.int16)[..., 3::4] & 0x7FFF) >> 4) - 1023


def _settle(result: Tensor, where: Tensor, before: Tensor, a: Decoded, b: Decoded, model: mma.Model) -> None:
    """Run the doubtful steps `where` [P, 3] through the slow model; redo the outputs whose bits it changes."""
    step, row, column = where.unbind(-1)
    c, fast = (before.flatten().index_select(0, _flat(before, s, row, column)).float() for s in (step, step + 1))
    pair_a, pair_b = _step_pairs(a.operand, row, step), _step_pairs(b.operand, column, step)
    slow = mma.step(pair_a, pair_b, c.view(torch.int32).view(-1, 1, 1), model).flatten()
    wrong = (slow != (fast + 0.0).view(torch.int32)).nonzero().squeeze(-1)
    if len(wrong):
        row, column = row[wrong], column[wrong]
        redone = mma.chain(a.operand.pairs(row), b.operand.pairs(column), model)
        result[row, column] = redone.flatten().view(torch.float32)


def _flat(x: Tensor, step: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return (step * x.shape[1] + row) * x.shape[2] + column


def _step_pairs(operand: mma.Operand, rows: Tensor, step: Tensor) -> mma.Operand:
    assert operand.scales is not None
    codes, scales = operand.codes.reshape(-1, STEP), operand.scales.reshape(-1, STEP // BLOCK)
    index = rows * (len(codes) // len(operand.codes)) + step
    return mma.Operand(
        codes.index_select(0, index).unsqueeze(1), scales.index_select(0, index).unsqueeze(1), operand.format
    )


def _by_step(values: Tensor) -> Tensor:
    return values.unflatten(-1, (-1, STEP)).transpose(0, 1)
