"""The two-instruction quotient decides every E2M1 and E4M3 rounding as the correctly rounded quotient does.

x / d and its approximation can fall on different sides of a rounding boundary b only where x / d is within the error
bound of an edge m = b (1 +- 2^-24 / b's significand) of the interval that rounds to b. In significands X, S (24 bits):
|X 2^j - m S| <= 2^-42 m S has at most one solution S for each X, so all of them can be listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

Edge = tuple[Fraction, int]  # boundary in [1, 2), and the sign of the half ulp that decides it


def edges() -> list[Edge]:
    """Ties of E4M3 (those of E2M1 among them) by significand: a tie above an even code goes down, else up."""
    found: set[Edge] = set()
    for code in range(8):
        sign = 1 if code % 2 == 0 else -1
        subnormal = Fraction(2 * code + 1)
        while subnormal >= 2:
            subnormal /= 2
        found |= {(subnormal, sign), (Fraction(17 + 2 * code, 16), sign)}
    return sorted(found)


def hard_pairs(edge: Edge) -> Iterator[tuple[int, int, int]]:
    """(X, S, j) for which X 2^j / S lies within 2^-42 of the edge."""
    numerator = int((edge[0] + edge[1] * Fraction(1, 2**24)) * 2**24)
    x = np.arange(2**23, 2**24, dtype=np.int64)
    for shift in (0, 1):
        target = x << (24 + shift)
        s = (target + numerator // 2) // numerator
        rest = np.abs(target - numerator * s).astype(np.float64)
        near = (s >= 2**23) & (s < 2**24) & (rest <= 2.0**-42 * numerator * s)
        yield from ((int(a), int(b), shift) for a, b in zip(x[near], s[near], strict=True))


def rounded(value: Fraction) -> Fraction:
    """Nearest 24-bit significand, ties to even."""
    if value == 0:
        return value
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    ulp = Fraction(2) ** (exponent - 23)
    return round(value / ulp) * ulp


def approximation(x: int, d: int) -> Fraction:
    head = rounded(Fraction(1, d))
    tail = rounded(rounded(1 - d * head) * head)
    if d == 2**24 - 1:
        tail *= 1 - Fraction(1, 2**24)  # one ulp nearer to 0: the tail is minus a power of two
    return rounded(x * head + rounded(x * tail))


@pytest.mark.slow
def test_all_hard_pairs_fall_on_the_right_side_of_their_boundary() -> None:
    wrong, count = [], 0
    for edge in edges():
        for x, d, shift in hard_pairs(edge):
            count += 1
            y, exact = approximation(x, d) * 2**shift, rounded(Fraction(x, d)) * 2**shift
            if (y > edge[0], y >= edge[0]) != (exact > edge[0], exact >= edge[0]):
                wrong.append((hex(x), hex(d), edge))
    assert count == 766
    assert wrong == []


def test_the_constants_divide_every_significand_by_six_correctly() -> None:
    x = np.arange(2**23, 2**24).astype(np.float64)
    sixth = float(rounded(Fraction(1, 6)))
    tail = float(rounded(Fraction(1, 6) - rounded(Fraction(1, 6))))
    product, small = x * sixth, (x.astype(np.float32) * np.float32(tail)).astype(np.float64)
    total = product + small
    error = (product - (total - (total - product))) + (small - (total - product))
    bits = total.view(np.int64) + np.where(
        (error != 0) & (total.view(np.int64) % 2 == 0), np.where(error > 0, 1, -1), 0
    )
    assert (bits.view(np.float64).astype(np.float32) == (x.astype(np.float32) / np.float32(6))).all()
    assert (sixth, tail) == (0.16666667163372040, -4.967053879312289e-09)


def test_the_exceptional_divisor_gives_the_emulators_code(launch: Callable[..., Any]) -> None:
    from quads.emulation import quantizers
    from quads.kernels import quantize as kernel

    step = torch.tensor(0xFFFFFF * 2.0**-24)
    x: Tensor = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 6.0, 0.25  # block scale 1, and 0.25 / step just above the tie at 0.25
    want = quantizers.quantize(x, step)
    assert want.scales.item() == 0x38
    assert want.codes[0, 1] == 1
    assert torch.equal(launch(kernel.quantize, x, step).packed, want.packed)
