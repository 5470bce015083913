"""Hypothesis strategies for tensors whose bits matter."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor


@st.composite
def float32_bits(draw: st.DrawFn, *, finite: bool = True) -> float:
    """Any FP32 number by its bits: exponents are uniform, so subnormals and extremes are as likely as anything."""
    sign = draw(st.integers(0, 1))
    mantissa = draw(st.one_of(st.integers(0, 2**23 - 1), st.sampled_from([0, 1, 2**23 - 1])))
    exponent = draw(st.integers(0, 254 if finite else 255))
    bits = (sign << 31) | (exponent << 23) | mantissa
    return float(torch.tensor(bits - (1 << 32) * sign, dtype=torch.int32).view(torch.float32))


@st.composite
def blocked_tensors(draw: st.DrawFn, *, max_rows: int = 3, max_blocks: int = 3) -> Tensor:
    """Tensors [M, 16 B], float32 or bfloat16, whose blocks spread over many binades, zeros and repeats included."""
    rows, blocks = draw(st.integers(1, max_rows)), draw(st.integers(1, max_blocks))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    centre = draw(st.integers(-100, 100))
    spread = draw(st.sampled_from([0, 2, 12, 25]))
    values = []
    for _ in range(rows * blocks):
        exponent = centre + draw(st.integers(-spread, spread))
        mantissas = draw(st.lists(st.integers(-(2**24), 2**24), min_size=16, max_size=16))
        values.append(torch.tensor(mantissas, dtype=torch.float64) * 2.0 ** (exponent - 24))
    return torch.stack(values).reshape(rows, blocks * 16).to(dtype)
