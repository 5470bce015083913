"""Refits and training steps, with QUADS and without.

pytest bench/bench_train.py --benchmark-only
"""

from __future__ import annotations

from typing import Any

from quads.bench.cases import Case, Group
from quads.bench.suite import cases_of


@cases_of("refit", "train_step")
def test_train(measured: Any, group: Group, case: Case) -> None:
    measured(group, case)
