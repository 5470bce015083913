"""Constants are changed while a tuned case runs, checked or timed, and are what they were afterwards."""

from __future__ import annotations

import types

import pytest

from quads.bench import tune
from quads.bench.cases import Case, Ready, catalogue


def test_constants_hold_while_the_case_is_checked_and_called_and_not_after() -> None:
    module = types.SimpleNamespace(_TILE=256)
    seen: list[int] = []

    def check() -> float:
        seen.append(module._TILE)
        return 0.0

    case = Case(
        numerics="nvfp4", implementation="ours", variant="tensor",
        ready=lambda _: Ready(calls=[lambda: seen.append(module._TILE)], bytes=1.0, check=check),
    )  # fmt: skip
    plan = tune.Plan("quantize", "tensor", module, ("_TILE",), ((64,),))  # type: ignore[arg-type]
    changed = tune.tuned(case, plan, (64,))
    ready = changed.ready(None)
    assert ready.check is not None
    ready.check()
    ready.calls[0]()
    assert (seen, module._TILE) == ([64, 64], 256)
    assert changed.variant == "tensor [64]"


def test_constants_are_restored_after_an_error() -> None:
    module = types.SimpleNamespace(_TILE=256)
    with pytest.raises(RuntimeError), tune.applied(module, {"_TILE": 1}):  # type: ignore[arg-type]
        raise RuntimeError
    assert module._TILE == 256


def test_every_constant_of_the_plan_exists() -> None:
    for plan in tune.PLANS:
        assert [name for name in plan.constants if not hasattr(plan.module, name)] == []


def test_every_case_of_the_plan_is_in_the_catalogue() -> None:
    found = list(tune.groups(catalogue("cuda")))
    assert [len(g.cases) for g in found] == [1 + len(plan.values) for plan in tune.PLANS]
