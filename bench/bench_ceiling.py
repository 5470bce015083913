"""Copy bandwidth and matrix peaks: what the shares of the other suites are of.

pytest bench/bench_ceiling.py --benchmark-only
"""

from __future__ import annotations

from typing import Any

from quads.bench.cases import Case, Group
from quads.bench.suite import cases_of


@cases_of("ceiling")
def test_ceiling(measured: Any, group: Group, case: Case) -> None:
    measured(group, case)
