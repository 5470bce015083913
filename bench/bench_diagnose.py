"""The cost of `quads diagnose`.

pytest bench/bench_diagnose.py --benchmark-only
"""

from __future__ import annotations

from typing import Any

from quads.bench.cases import Case, Group
from quads.bench.suite import cases_of


@cases_of("diagnose")
def test_diagnose(measured: Any, group: Group, case: Case) -> None:
    measured(group, case)
