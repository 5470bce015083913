"""Cases that Hypothesis makes and shrinks, for kernels that pass everything written down."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quads.conformance.protocol import DTYPES, Protocol


def available() -> bool:
    """Whether Hypothesis is installed (an optional package)."""
    return importlib.util.find_spec("hypothesis") is not None


def find_difference(protocol: Protocol, differs: Callable[[Tensor], bool], examples: int, seed: int) -> Tensor | None:
    """The smallest generated matrix on which `differs`; None where `examples` tries find none. Deterministic."""
    from hypothesis import HealthCheck, Phase, find, settings
    from hypothesis.errors import NoSuchExample

    chosen = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    try:
        return find(_matrices(protocol), differs, settings=chosen, random=random.Random(seed))
    except NoSuchExample:
        return None


def _matrices(protocol: Protocol) -> Any:
    """A block or two, rows filled up to 16: exponents spread over few or many binades, any mantissa."""
    from hypothesis import strategies as st

    @st.composite
    def matrices(draw: Any) -> Tensor:
        dtype = DTYPES[draw(st.sampled_from(protocol.dtypes))]
        k, rows = max(16, protocol.k_multiple), max(2, protocol.row_multiple)
        centre, spread = draw(st.integers(-12, 12)), draw(st.sampled_from([0, 2, 8, 20]))
        blocks = []
        for _ in range(rows):
            exponent = centre + draw(st.integers(-spread, 0))
            mantissas = draw(st.lists(st.integers(-256, 256), min_size=16, max_size=16))
            blocks.append(torch.tensor(mantissas, dtype=torch.float64) * 2.0 ** (exponent - 8))
        x = torch.zeros(-(-rows // 16) * 16, k, dtype=dtype)
        x[:rows, :16] = torch.stack(blocks).to(dtype)
        return x

    return matrices()
