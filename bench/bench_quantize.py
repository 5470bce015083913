"""Quantisers with RAC and without, fake-quantisers, outer scales; ModelOpt's, fouroversix's, vLLM's.

pytest bench/bench_quantize.py --benchmark-only
"""

from __future__ import annotations

from typing import Any

from quads.bench.cases import Case, Group
from quads.bench.suite import cases_of


@cases_of("quantize", "quantize_rac", "fake_quantize", "outer_scale")
def test_quantize(measured: Any, group: Group, case: Case) -> None:
    measured(group, case)
