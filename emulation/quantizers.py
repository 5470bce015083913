"""NVFP4 quantisers: one engine for every dialect.

The project's own dialect, `exact`: every division is correctly rounded FP32, nothing is a reciprocal.
    g    = fl(amax / 2688)                      outer scale, decode direction (a multiplier); 1 where amax = 0
    s    = e4m3_sat(fl(fl(v / 6) / g))          block scale, v = max|x| over 16 elements along K
    code = e2m1_sat(fl(x / fl(s * g)))          0 (sign kept) where s * g = 0
    Q(x) = fl(fl(q * s) * g)                    q * s is exact
Other dialects (`quads.emulation.dialects`) differ in the fields of their record and in nothing else. Outer scales
are given and kept as multipliers, or as divisors gs by a dialect that divides by amax; the result always holds the
multiplier, fl(1 / gs) there. All arithmetic is FP32, one rounding an operation, no FMA; nothing is flushed unless a
dialect says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quads.emulation import dialects, formats, four_over_six, layout, reciprocal, scaling
from quads.emulation.dialects import EXACT, Dialect
from quads.emulation.reciprocal import Reciprocal

BLOCK = dialects.BLOCK
OUTER_MAX = formats.E2M1_MAX * formats.E4M3_MAX  # 2688

Granularity = Literal["tensor", "token"]


@dataclass(frozen=True)
class NVFP4Tensor:
    """Codes uint8 [..., K] (a nibble each), block scales E4M3 bytes uint8 [..., K/16], outer scale float32.

    The outer scale has shape [] (per tensor) or [..., 1] (per token). Value = code * block scale * outer scale.
    """

    codes: Tensor
    scales: Tensor
    outer: Tensor

    @property
    def packed(self) -> Tensor:
        return layout.pack(self.codes)


@dataclass(frozen=True)
class Trace:
    """One quantisation with every rounded intermediate: name -> float32, of element or block shape, in order."""

    steps: dict[str, Tensor]
    result: NVFP4Tensor


@dataclass(frozen=True)
class Decided:
    """Whether bits depend on rcp: True where every reciprocal within 1 ulp gives them. [..., K] and [..., K/16]."""

    codes: Tensor
    scales: Tensor


def outer_scale(x: Tensor, granularity: Granularity | None = None, *, dialect: str | Dialect = EXACT) -> Tensor:
    """The dialect's outer scale as float32: shape [] (tensor) or [..., 1] (token).

    `exact`: g = amax / 2688, 1 where amax is 0. A dialect of the encode direction returns its divisor gs.
    """
    d = dialects.load(dialect)
    return scaling.outer_of(scaling.amax_of(scaling.magnitude_of(x, d), granularity or d.granularity), d)


def quantize(
    x: Tensor,
    outer: Tensor | None = None,
    *,
    granularity: Granularity | None = None,
    dialect: str | Dialect = EXACT,
) -> NVFP4Tensor:
    """Quantise `x` [..., K] (float32, bfloat16 or float16; K % 16 == 0) to NVFP4 along K.

    `outer` overrides the outer scale (in the dialect's own direction). `granularity` overrides the dialect's.
    Raises ValueError on a bad shape, an empty tensor, and NaN or Inf where the dialect does not follow them.
    """
    return trace(x, outer, granularity=granularity, dialect=dialect).result


def trace(
    x: Tensor,
    outer: Tensor | None = None,
    *,
    granularity: Granularity | None = None,
    dialect: str | Dialect = EXACT,
    rcp: Reciprocal | None = None,
) -> Trace:
    """`quantize`, with its intermediates; `rcp` overrides the dialect's reciprocal."""
    d = dialects.load(dialect)
    check_input(x, finite=False)
    _check_tile(x, outer, d)
    rcp = rcp or reciprocal.NAMED[d.reciprocal]
    maxima = scaling.magnitude_of(x, d).unflatten(-1, (-1, BLOCK)).amax(dim=-1)
    if d.nonfinite == "refuse":
        _refuse_nonfinite(maxima, x, "tensor")
    amax = scaling.amax_of(maxima, granularity or d.granularity)
    given = scaling.outer_of(amax, d) if outer is None else outer.float()
    outers = scaling.both_directions(given, rcp, d)
    value = scaling.flush(x.float(), d)
    blocks = value.unflatten(-1, (-1, BLOCK))
    v = scaling.shared_max(scaling.flush(maxima, d), d)
    base = scaling.block_scale(v, outers, rcp, d)
    candidates = [scaling.candidate(blocks, v, base, factor, outers, rcp, d) for factor in scaling.factors(d)]
    chosen = candidates[0] if d.rule == "six" else four_over_six.better(candidates, blocks, amax, outers, d)
    steps = {"v": v.float(), "gs" if d.encodes else "g": given, **chosen.steps}
    return Trace(steps, NVFP4Tensor(chosen.codes.flatten(-2), chosen.scales, outers.g))


def dequantize(q: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Q(x) = (code * block scale) * outer scale, each product rounded to float32, then one cast to `dtype`."""
    return (unscaled(q) * q.outer).to(dtype)


def unscaled(q: NVFP4Tensor) -> Tensor:
    """code * block scale as float32, exact: at most six significant bits, so exact in bfloat16 too."""
    values = formats.decode(q.codes, formats.E2M1).unflatten(-1, (-1, BLOCK))
    return (values * formats.decode(q.scales, formats.E4M3).unsqueeze(-1)).flatten(-2)


def decided(x: Tensor, outer: Tensor | None = None, *, dialect: str | Dialect) -> Decided:
    """Which codes and block scales of `x` do not depend on the bits of rcp.approx.

    True where the correctly rounded and the measured reciprocal, and every combination of +-1 ulp at the sites that
    take one, agree. A dialect whose reciprocals are exact by its own definition is decided everywhere.
    """
    d = dialects.load(dialect)
    first = trace(x, outer, dialect=d, rcp=reciprocal.NAMED["exact"]).result
    codes, scales = torch.ones_like(first.codes, dtype=torch.bool), torch.ones_like(first.scales, dtype=torch.bool)
    if d.reciprocal == "exact":
        return Decided(codes, scales)
    for rcp in (reciprocal.NAMED["table"], *reciprocal.corners()):
        other = trace(x, outer, dialect=d, rcp=rcp).result
        codes &= other.codes == first.codes
        scales &= other.scales == first.scales
    return Decided(codes, scales)


def check_input(x: Tensor, name: str = "tensor", *, finite: bool = True) -> None:
    """Raise ValueError, naming tensor and rule, where no NVFP4 quantisation of `x` is defined."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name} has dtype {x.dtype}: NVFP4 quantisation takes float32, bfloat16 or float16")
    if x.ndim == 0 or x.numel() == 0:
        raise ValueError(f"{name} of shape {tuple(x.shape)} is empty: nothing to quantise")
    if x.shape[-1] % BLOCK:
        raise ValueError(f"{name} of shape {tuple(x.shape)}: K = {x.shape[-1]} is not a multiple of {BLOCK}")
    if finite:
        _refuse_nonfinite(x.abs(), x, name)


def _refuse_nonfinite(magnitude: Tensor, x: Tensor, name: str) -> None:
    if not bool(magnitude.amax().isfinite()):  # amax hands NaN on
        raise ValueError(f"{name} of shape {tuple(x.shape)} holds NaN or Inf: refuse to quantise it")


def _check_tile(x: Tensor, outer: Tensor | None, d: Dialect) -> None:
    if d.tile == "16x16" and (x.ndim < 2 or x.shape[-2] % BLOCK):
        raise ValueError(f"tensor of shape {tuple(x.shape)}: 16x16 tiles need rows in a multiple of {BLOCK}")
    if outer is not None and d.error == "q*s*amax/max" and d.rule != "six":
        raise ValueError(f"dialect {d.name!r} weighs its error by amax: it cannot take an outer scale")
