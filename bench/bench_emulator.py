"""The emulator's FP4 products beside mmasim's and a float32 product.

pytest bench/bench_emulator.py --benchmark-only
"""

from __future__ import annotations

from typing import Any

from quads.bench.cases import Case, Group
from quads.bench.suite import cases_of


@cases_of("emulator")
def test_emulator(measured: Any, group: Group, case: Case) -> None:
    measured(group, case)
