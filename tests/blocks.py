"""Blocks that tell quantisers apart: every bf16 block maximum under every amax of a binade, elements at E2M1 ties.

Random Gaussian blocks hide the order of a product, a reciprocal off by one and a tie rule; these show them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_LOWEST_SCALE = 2.0**-10  # a block scale at or below it is code 0


def bfloat16_binade(exponent: int = 1) -> list[float]:
    """The 128 bf16 values of [2^exponent, 2^(exponent+1))."""
    return [(1 + m / 128) * 2.0**exponent for m in range(128)]


def block_maxima(amax: float) -> Tensor:
    """Every bf16 v <= amax, down to one binade below where its block scale reaches code 0 (bf16, descending)."""
    lowest = _LOWEST_SCALE * 6 * amax / 2688 / 2
    bits = torch.arange(_bits(lowest), _bits(amax) + 1, dtype=torch.int32).flip(0)
    return bits.to(torch.int16).view(torch.bfloat16)


def blocks_at_ties(v: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 16]: the maximum v, -0, and for each tie its nearest number below and above t * step; signs alternate.

    `step` is what the quantiser divides by (block scale times outer scale). Nothing exceeds v, which may have either
    sign. The pair straddles the tie, or holds it where it is representable.
    """
    ties = torch.tensor(TIES, dtype=torch.float64) * step.double().unsqueeze(-1)
    near = ties.to(dtype)
    above = torch.nextafter(near.float(), torch.tensor(torch.inf)) if dtype == torch.float32 else _next(near, 1)
    below = torch.nextafter(near.float(), torch.tensor(0.0)) if dtype == torch.float32 else _next(near, -1)
    other = torch.where(near.double() <= ties, above.to(dtype), below.to(dtype))
    pairs = torch.stack([near, other], dim=-1).flatten(-2)
    pairs = torch.minimum(pairs, v.to(dtype).unsqueeze(-1))
    alternating = torch.tensor([-1.0, 1.0, 1.0, -1.0]).repeat(4)[:14].to(dtype)
    zero = torch.full_like(v, -0.0, dtype=dtype).unsqueeze(-1)
    top = torch.where(torch.arange(len(v)) % 2 == 0, v.to(dtype), -v.to(dtype)).unsqueeze(-1)
    return torch.cat([top, pairs * alternating, zero], dim=-1)


def amax_row(amax: float, dtype: torch.dtype) -> Tensor:
    """A row [1, 16] that makes `amax` the tensor's largest magnitude."""
    row = torch.zeros(1, 16, dtype=dtype)
    row[0, 5] = -amax
    return row


def special_blocks(amax: float, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Named blocks [1, 16] for a tensor of largest magnitude `amax`: zero, -0, underflow, NaN, Inf."""
    tiny = 1e-6 * amax
    rows = {
        "zero": [0.0] * 16,
        "negative zero": [-0.0] * 16,
        "underflow": [tiny, -tiny, 0.0, tiny / 5, -0.0] + [0.0] * 11,
        "subnormal": [1e-39, -1e-39, 0.0, -0.0] + [0.0] * 12,
        "one NaN": [torch.nan, amax / 2, -amax / 3] + [0.1 * amax] * 13,
        "all NaN": [torch.nan] * 16,
        "one Inf": [torch.inf, amax / 2, -amax / 3, -0.0] + [0.0] * 12,
        "minus Inf": [-torch.inf, amax / 2, -amax / 3, -0.0] + [0.0] * 12,
    }
    for name, row in rows.items():
        yield name, torch.tensor([row]).to(dtype)


def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.bfloat16).view(torch.int16))


def _next(x: Tensor, step: int) -> Tensor:
    """The neighbour of positive 16-bit floats, in their codes."""
    return (x.view(torch.int16) + step).clamp(min=0).to(torch.int16).view(x.dtype)
