"""A plain NVFP4 quantiser and products, written without the emulator, whose parts can be exchanged for wrong ones.

E4M3 comes from torch's own float8 cast, E2M1 from midpoints with a parity rule, layouts from explicit loops. Mutation
tests exchange one part for what a real kernel got wrong; nothing here knows what the harness looks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MIDDLE = (GRID[1:] + GRID[:-1]) / 2


def nearest_even(y: Tensor) -> Tensor:
    """Code magnitude: above a midpoint counts; on it, the even code of the two; NaN is 7, as `cvt` has it."""
    above = (y.abs().unsqueeze(-1) > MIDDLE).sum(-1)
    on = (y.abs().unsqueeze(-1) == MIDDLE).any(-1)
    return torch.where(y.isnan(), 7, above + (on & (above % 2 == 1)).long())


def e4m3(value: Tensor) -> Tensor:
    return value.clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def low_first(codes: Tensor) -> Tensor:
    return codes[:, 0::2] + 16 * codes[:, 1::2]


def sign_in_bit_3(magnitude: Tensor, y: Tensor) -> Tensor:
    return magnitude + 8 * (torch.signbit(y) & ~y.isnan()).long()


def row_major(scales: Tensor) -> Tensor:
    return scales


def tiles(scales: Tensor, rows: int = 128, *, columns_up: int = 4) -> Tensor:
    """The 128x4 (or 8x4) layout by its offset formula, in loops; padding zero."""
    m, b = scales.shape
    up_m, up_b = -(-m // rows) * rows, -(-b // columns_up) * columns_up
    out = torch.zeros(up_m * up_b, dtype=torch.uint8)
    row, block = torch.meshgrid(torch.arange(m), torch.arange(b), indexing="ij")
    strip = 32 if rows == 128 else rows
    at = (row // rows * (up_b // 4) + block // 4) * rows * 4 + row % strip * (rows // strip) * 4
    out[at + row % rows // strip * 4 + block % 4] = scales
    return out.reshape(up_m, up_b)


@dataclass(frozen=True)
class Kernel:
    """The parts of the quantiser; `g` is the outer scale as a multiplier."""

    prepare: Callable[[Tensor], Tensor] = lambda x: x
    block_max: Callable[[Tensor], Tensor] = lambda blocks: blocks.abs().amax(-1)
    outer: Callable[[Tensor], Tensor] = lambda g: g
    wanted: Callable[[Tensor, Tensor], Tensor] = lambda v, g: v / torch.tensor(6.0) / g
    cast: Callable[[Tensor], Tensor] = e4m3
    decode: Callable[[Tensor, Tensor], Tensor] = lambda byte, wanted: byte.view(torch.float8_e4m3fn).float()
    scale: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda x, s, g: x / (s * g)
    nothing: Callable[[Tensor, Tensor], Tensor] = lambda x, y: x * 0
    magnitude: Callable[[Tensor], Tensor] = nearest_even
    sign: Callable[[Tensor, Tensor], Tensor] = sign_in_bit_3
    finish: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda codes, scales: (codes, scales)
    pack: Callable[[Tensor], Tensor] = low_first
    place: Callable[[Tensor], Tensor] = row_major

    def __call__(self, x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
        blocks = self.prepare(x).float().unflatten(-1, (-1, 16))
        g = self.outer(outer)
        wanted = self.wanted(self.block_max(blocks), g)
        scales = self.cast(wanted)
        s = self.decode(scales, wanted).unsqueeze(-1)
        y = torch.where(s * g == 0, self.nothing(blocks, s), self.scale(blocks, s, g))
        codes = self.sign(self.magnitude(y), y).flatten(-2).to(torch.uint8)
        codes, scales = self.finish(codes, scales)
        return self.pack(codes), self.place(scales)

    def but(self, **parts: Any) -> Kernel:
        return replace(self, **parts)


def values(packed: Tensor, scales: Tensor) -> Tensor:
    """float64 values [rows, K] of packed codes and linear scales; the sign of a scale is ignored, 0x7F is NaN."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    grid = torch.cat([GRID, -GRID]).double()[codes]
    s = (scales & 0x7F).view(torch.float8_e4m3fn).double()
    return (grid.unflatten(-1, (-1, 16)) * s.unsqueeze(-1)).flatten(-2)
