"""Routed W4A4 layers beside vLLM's; on a CPU the emulated layer.

pytest bench/bench_moe.py --benchmark-only
"""

from __future__ import annotations

from typing import Any

from quads.bench.cases import Case, Group
from quads.bench.suite import cases_of


@cases_of("moe")
def test_moe(measured: Any, group: Group, case: Case) -> None:
    measured(group, case)
