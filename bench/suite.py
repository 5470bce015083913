"""The cases of an operation as pytest parameters: what cannot run here is skipped with its reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from quads.bench.cases import Case, Group, catalogue
from quads.bench.timing import Moment
from quads.kernels import support


def cases_of(*operations: str) -> Any:
    """Parameters `group` and `case`: the quick shapes of `operations`, all of them under QUADS_FULL=1."""
    return pytest.mark.parametrize(("group", "case"), list(_parameters(operations)))


def _parameters(operations: tuple[str, ...]) -> Iterator[Any]:
    everything = os.environ.get("QUADS_FULL") == "1"
    for device in ("cuda", "cpu"):
        for group in catalogue(device):
            if group.op in operations and (group.quick or everything):
                yield from (pytest.param(group, c, id=group.name(c), marks=_marks(group, c)) for c in group.cases)


def _marks(group: Group, case: Case) -> list[Any]:
    timer = {"timer": Moment} if group.device == "cuda" else {}
    marks = [pytest.mark.benchmark(group=group.title, **timer)]
    reason = (support.missing_gpu() if group.device == "cuda" else "") or case.missing()
    return [*marks, pytest.mark.skip(reason=reason)] if reason else marks
