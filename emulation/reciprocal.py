"""Reciprocals: correctly rounded, as one GPU's `rcp.approx.ftz.f32` gives them, or off by a unit in the last place.

Kernels built with the fast instruction promise 1 ulp and no bits. Only the 2^23 significands matter (the exponent is
exact), and data/rcp_approx_h200.npz holds the difference from the correctly rounded reciprocal for each of them,
measured on an NVIDIA H200: 2 bits an entry, difference + 1, four entries a byte from the low bits up, index = low 23
bits of the FP32 significand. That Blackwell gives the same bits is an assumption. FTZ: subnormal in -> Inf with the
sign, subnormal out -> 0.
Source of the promise: PTX ISA, rcp.approx.ftz.f32, maximum relative error 2^-23.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Site = Literal["six", "outer", "multiplier"]  # rcp(6), rcp(outer scale), rcp(block scale * outer scale)

_TABLE = Path(__file__).with_name("data") / "rcp_approx_h200.npz"
_MANTISSA = 0x7FFFFF
_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True, kw_only=True)
class Reciprocal:
    """1/x: from the measured table or correctly rounded, then moved by a number of ulps chosen for each site."""

    table: bool = False
    six: int = 0
    outer: int = 0
    multiplier: int = 0

    def __call__(self, x: Tensor, site: Site) -> Tensor:
        """1/x as float32 for `x` (float32, any shape)."""
        result = approximate(x) if self.table else 1.0 / x
        ulps = getattr(self, site)
        return nudge(result, ulps) if ulps else result


NAMED = {
    "exact": Reciprocal(),
    "table": Reciprocal(table=True),
    "+1ulp": Reciprocal(six=1, outer=1, multiplier=1),
    "-1ulp": Reciprocal(six=-1, outer=-1, multiplier=-1),
}


def corners() -> tuple[Reciprocal, ...]:
    """Every site one ulp up or down, independently.

    A scale byte is monotone in rcp(6); with the byte given, a code is monotone in rcp(outer) and in the last
    reciprocal. What all corners agree on therefore holds for every reciprocal within 1 ulp.
    """
    return tuple(Reciprocal(six=a, outer=b, multiplier=c) for a, b, c in product((-1, 1), repeat=3))


def approximate(x: Tensor) -> Tensor:
    """`rcp.approx.ftz.f32` of `x` (float32) as the H200 computes it."""
    flushed = torch.where(x.abs() < _SMALLEST_NORMAL, torch.copysign(torch.zeros_like(x), x), x)
    difference = ulp_table().to(x.device)[(x.view(torch.int32) & _MANTISSA).long()]
    mantissa, exponent = torch.frexp(flushed)
    significand = nudge(1.0 / mantissa, difference)  # 1/[0.5, 1): the same bits for every exponent
    scaled = (significand.double() * torch.exp2(-exponent.double())).float()
    result = torch.where(flushed.isfinite() & (flushed != 0), scaled, 1.0 / flushed)
    return torch.where(result.abs() < _SMALLEST_NORMAL, torch.copysign(torch.zeros_like(x), x), result)


def nudge(x: Tensor, ulps: int | Tensor) -> Tensor:
    """`x` (float32) moved away from zero by `ulps` units in the last place; 0, Inf and NaN stay."""
    moved = (x.view(torch.int32) + ulps).view(torch.float32)
    return torch.where(x.isfinite() & (x != 0), moved, x)


@cache
def ulp_table() -> Tensor:
    """Difference (int32 [2^23]; -1, 0 or 1) of the measured reciprocal from the correctly rounded one."""
    with np.load(_TABLE, allow_pickle=False) as data:
        packed = torch.from_numpy(data["packed"])
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 3).flatten().int() - 1
