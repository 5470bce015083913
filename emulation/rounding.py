"""Rounding a real number to an integer, in the directions that the conversions of PTX know.

The number is given as a sign and a float64 magnitude, so FP32 significands shifted into place are exact.
    rne  to nearest, ties to even              rz  toward zero
    rp   toward plus infinity                  rs  stochastic, as cvt.rs: see `carry_out`
Source: PTX ISA, instruction cvt, modifiers .rn .rz .rp .rs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Rounding = Literal["rne", "rz", "rp", "rs"]


def round_magnitude(
    magnitude: Tensor,
    negative: Tensor,
    rounding: Rounding = "rne",
    *,
    random_bits: Tensor | None = None,
    random_width: int = 8,
) -> Tensor:
    """`magnitude` (float64, >= 0) of numbers with sign `negative` (bool), rounded to integers (float64).

    `random_bits` (integers in [0, 2^random_width), same shape) are what `rs` adds; ValueError where they are
    missing, or given to another rounding.
    """
    if (rounding == "rs") != (random_bits is not None):
        raise ValueError(f"random_bits go with rounding 'rs' and with no other; the rounding is {rounding!r}")
    if random_bits is not None:
        return magnitude.floor() + carry_out(magnitude.frac(), random_bits, random_width)
    if rounding not in _DIRECTED:
        raise ValueError(f"rounding {rounding!r} is not one of rne, rz, rp, rs")
    return _DIRECTED[rounding](magnitude, negative)


def carry_out(discarded: Tensor, random_bits: Tensor, width: int) -> Tensor:
    """Carry (0.0 or 1.0) of adding `random_bits` to the top `width` bits of the `discarded` fraction in [0, 1).

    cvt.rs rounds away from zero on a carry out of the discarded bits, so P(away) is the fraction truncated to
    `width` bits; width is 8 for e2m1x4 and e4m3x4. Whether more of the fraction takes part is not visible:
    random_bits are whole units of its last place.
    """
    if bool(((random_bits < 0) | (random_bits >= 1 << width)).any()):
        raise ValueError(f"random_bits outside [0, 2^{width}): {width} bits are added to each element")
    return ((discarded * (1 << width)).floor() + random_bits.double() >= 1 << width).double()


_DIRECTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rne": lambda magnitude, negative: magnitude.round(),
    "rz": lambda magnitude, negative: magnitude.floor(),
    "rp": lambda magnitude, negative: torch.where(negative, magnitude.floor(), magnitude.ceil()),
}
