"""W4A4 products beside cuBLAS bfloat16, FP8 and Marlin.

pytest bench/bench_gemm.py --benchmark-only
"""

from __future__ import annotations

from typing import Any

from quads.bench.cases import Case, Group
from quads.bench.suite import cases_of


@cases_of("gemm")
def test_gemm(measured: Any, group: Group, case: Case) -> None:
    measured(group, case)
