"""Inputs that tell quantisers apart. Random Gaussian blocks hide the order of a product, a reciprocal that is off by
one, a tie rule and every rule for zero, -0, underflow and padding; these cases are made to show them.

A case is a matrix [M, K]; most have one block a row. `amax` is the calibrated magnitude behind an outer scale that is
given (None: the tensor's own). All values are written down or enumerated: nothing here depends on a random generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quads.conformance.protocol import Protocol
from quads.emulation import formats
from quads.emulation.dialects import Dialect
from quads.emulation.quantizers import trace

TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# (amax, block maximum) where two associations of the block scale give two bytes (found by enumeration in bf16).
ASSOCIATIONS = (
    (2.03125, 0.005950927734375),
    (2.1875, 0.004425048828125),
    (2.1875, 0.00762939453125),
    (2.1875, 0.00518798828125),
    (2.0, 0.005859375),
    (2.1875, 0.004119873046875),
)
_LOWEST_SCALE = 2.0**-10  # a block scale at or below it is code 0


@dataclass(frozen=True)
class QuantCase:
    """One input of a quantiser: `group` is the property it is made for."""

    name: str
    group: str
    x: Tensor
    amax: float | None = None  # calibrated; needs an outer scale that is given
    asked: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # see `reference`

    @property
    def finite(self) -> bool:
        return bool(self.x.isfinite().all())


@lru_cache(maxsize=4)
def directed(protocol: Protocol, dtype: torch.dtype) -> tuple[QuantCase, ...]:
    """Written-down cases: special blocks, ties, associations, saturation, shapes, strides."""
    return tuple(_directed(protocol, dtype))


def _directed(protocol: Protocol, dtype: torch.dtype) -> Iterator[QuantCase]:
    for name, x in _special_blocks(2.5, dtype):
        yield QuantCase(f"special/{name}", "special", _rows(x, protocol))
    yield QuantCase("special/zero tensor", "special", _rows(torch.zeros(1, 16, dtype=dtype), protocol))
    yield QuantCase("special/-0 tensor", "special", _rows(torch.full((1, 16), -0.0, dtype=dtype), protocol))
    for name, x in _nonfinite_blocks(2.5, dtype):
        yield QuantCase(f"nonfinite/{name}", "nonfinite", _rows(x, protocol))
    yield QuantCase("ties/step 1", "ties", _rows(_ties_at_step_one(dtype), protocol))
    yield QuantCase("packing/every code", "packing", _rows(_every_code(dtype), protocol))
    for amax, v in ASSOCIATIONS:
        x = torch.cat([_amax_row(amax, dtype), _ramp(v, dtype)])
        yield QuantCase(f"association/{amax:g}, {v:g}", "association", _rows(x, protocol))
    if protocol.outer != "own":
        for factor in (1.0, 464 / 448, 480 / 448, 1.2, 2.0, 1e3):
            x = _ramp(2.5 * factor, dtype)
            yield QuantCase(f"saturation/{factor:.4g} x amax", "saturation", _rows(x, protocol), amax=2.5)
    yield from _shapes(protocol, dtype)


def _shapes(protocol: Protocol, dtype: torch.dtype) -> Iterator[QuantCase]:
    """Rows and blocks around tile edges; values differ in every block, so a misplaced scale or tail shows."""
    shapes = [(1, 16), (1, 464), (5, 48), (7, 80), (32, 64), (33, 208), (127, 64), (128, 128), (129, 80), (256, 128)]
    taken = set()
    for rows, k in shapes:
        shape = _up(rows, protocol.row_multiple), _up(k, protocol.k_multiple)
        if shape not in taken:
            taken.add(shape)
            yield QuantCase(f"shape/{shape[0]}x{shape[1]}", "shape", mixed(*shape, dtype))
    rows, k = _up(48, protocol.row_multiple), _up(64, protocol.k_multiple)
    wide = torch.full((rows, k + 32), torch.nan, dtype=dtype)  # NaN beside the slice: an over-read shows
    wide[:, 16 : 16 + k] = mixed(rows, k, dtype)
    yield QuantCase("stride/slice of a wider matrix", "stride", wide[:, 16 : 16 + k])


def enumeration(amax: float, dialect: Dialect, protocol: Protocol, dtype: torch.dtype) -> QuantCase:
    """Every bf16 block maximum under `amax`, down to a zero block scale, with elements on both sides of each tie.

    The ties are those of the step (block scale times outer scale) that `dialect` takes.
    """
    v = block_maxima(amax)
    seed = torch.zeros(len(v), 16, dtype=dtype)
    seed[:, 0] = v.to(dtype)
    taken = trace(torch.cat([_amax_row(amax, dtype), seed]), dialect=plain(dialect)).result
    step = (formats.decode(taken.scales, formats.E4M3) * taken.outer)[1:, 0]
    x = torch.cat([_amax_row(amax, dtype), blocks_at_ties(v, torch.where(step > 0, step, 1.0), dtype)])
    return QuantCase(f"enumeration/amax {amax:g}", "enumeration", _rows(x, protocol))


def plain(dialect: Dialect) -> Dialect:
    """`dialect` for single blocks under one outer scale."""
    return dialect.replace(granularity="tensor", tile="1x16")


def amaxes(count: int) -> list[float]:
    """`count` of the 128 bf16 values in [2, 4), spread evenly, 2.0 first."""
    return [2.0 + 2.0 * (index * 128 // count) / 128 for index in range(count)]


def block_maxima(amax: float) -> Tensor:
    """Every bf16 v <= amax, down to one binade below where its block scale reaches code 0 (descending)."""
    lowest = _LOWEST_SCALE * 6 * amax / 2688 / 2
    bits = torch.arange(_bits(lowest), _bits(amax) + 1, dtype=torch.int32).flip(0)
    return bits.to(torch.int16).view(torch.bfloat16)


def blocks_at_ties(v: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 16]: the maximum, the neighbours below and above (or at) each tie of `step`, -0; signs alternate."""
    ties = torch.tensor(TIES, dtype=torch.float64) * step.double().unsqueeze(-1)
    near = ties.to(dtype)
    other = torch.where(near.double() <= ties, _neighbour(near, 1), _neighbour(near, -1))
    pairs = torch.stack([near, other], dim=-1).flatten(-2)
    pairs = torch.minimum(pairs, v.to(dtype).unsqueeze(-1))
    signs = torch.tensor([-1.0, 1.0, 1.0, -1.0]).repeat(4)[:14].to(dtype)
    top = torch.where(torch.arange(len(v)) % 2 == 0, v, -v).to(dtype).unsqueeze(-1)
    return torch.cat([top, pairs * signs, torch.full_like(top, -0.0)], dim=-1)


def mixed(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """[rows, k] whose blocks differ in scale by up to 2^12 and whose elements run through the grid, by counting."""
    index = torch.arange(rows * k, dtype=torch.int64).reshape(rows, k)
    block = index // 16
    mantissa = ((index * 37 + block * 11) % 251 - 125).double() / 125
    x = mantissa * torch.exp2(-((block * 7) % 13).double())
    x[0, 0] = 2.5
    return x.to(dtype)


def _special_blocks(amax: float, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    tiny = 1e-6 * amax
    yield "zero block", torch.cat([_amax_row(amax, dtype), torch.zeros(1, 16, dtype=dtype)])
    yield "-0 block", torch.cat([_amax_row(amax, dtype), torch.full((1, 16), -0.0, dtype=dtype)])
    rows = {
        "-0 beside numbers": [1.0, -0.0, 0.5, -0.0, 1e-3, -1e-3] + [-0.0] * 10,
        "underflow": [tiny, -tiny, 0.0, tiny / 5, -0.0] + [0.0] * 11,
        "all negative": [-amax, -1.0, -0.5, -0.1] + [-0.2] * 12,
        "one large, rest small": [amax / 2] + [amax * 1e-4 * (i - 8) for i in range(15)],
    }
    for name, row in rows.items():
        yield name, torch.cat([_amax_row(amax, dtype), torch.tensor([row]).to(dtype)])
    smallest = torch.tensor([[6 * amax / 2688 * 2.0**-10 * f] + [0.0] * 15 for f in (0.98, 1.0, 1.02, 1.5, 2.5)])
    yield "around the smallest scale", torch.cat([_amax_row(amax, dtype), smallest.to(dtype)])


def _nonfinite_blocks(amax: float, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    rows = {
        "one NaN": [torch.nan, amax / 2, -amax / 3] + [0.1 * amax] * 13,
        "all NaN": [torch.nan] * 16,
        "one Inf": [torch.inf, amax / 2, -amax / 3, -0.0] + [0.0] * 12,
    }
    for name, row in rows.items():
        yield name, torch.cat([_amax_row(amax, dtype), torch.tensor([row]).to(dtype)])


def _ties_at_step_one(dtype: torch.dtype) -> Tensor:
    """amax 2688 makes the outer scale 1, a block maximum 6 the block scale 1: elements are on the grid's own ties."""
    near = torch.tensor([6.0, *TIES, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0.2501]).to(dtype)
    above, below = (_neighbour(near.abs(), step).copysign(near) for step in (1, -1))
    above[0] = below[0] = 6.0
    extra = torch.tensor([6.0, 0.2501, 0.7499, 2.501, 5.001, 3.4999, 1.2501, 1.7499] + [0.0] * 8).to(dtype)
    return torch.cat([_amax_row(2688.0, dtype), torch.stack([near, above, below, extra])])


def _every_code(dtype: torch.dtype) -> Tensor:
    """All 15 values of E2M1 at step 1, in an order in which no neighbours agree, over three blocks of unequal scale."""
    grid = [0.5, 6.0, -1.0, 3.0, 1.5, -4.0, 2.0, -0.5, 4.0, -6.0, 1.0, -3.0, 0.0, -1.5, 6.0, -2.0]
    block = torch.tensor([grid])
    return torch.cat([_amax_row(2688.0, dtype), (block * torch.tensor([[1.0], [2.0], [64.0]])).to(dtype)])


def _amax_row(amax: float, dtype: torch.dtype) -> Tensor:
    row = torch.zeros(1, 16, dtype=dtype)
    row[0, 5] = -amax
    return row


def _ramp(top: float, dtype: torch.dtype) -> Tensor:
    return (torch.linspace(-1, 1, 16, dtype=torch.float64).unsqueeze(0) * top).to(dtype)


def _rows(x: Tensor, protocol: Protocol) -> Tensor:
    """Rows of one block filled up to a multiple of 16 (tiles of 16x16) and K to the protocol's, with zeros."""
    rows, k = _up(x.shape[0], max(16, protocol.row_multiple)), _up(x.shape[1], protocol.k_multiple)
    return torch.nn.functional.pad(x, (0, k - x.shape[1], 0, rows - x.shape[0]))


def _neighbour(x: Tensor, step: int) -> Tensor:
    """The next number up (1) or down (-1) from positive `x`, in its own dtype."""
    integer = torch.int32 if x.dtype == torch.float32 else torch.int16
    return (x.view(integer) + step).clamp(min=0).to(integer).view(x.dtype)


def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.bfloat16).view(torch.int16))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
