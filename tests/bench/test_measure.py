"""A group is measured case by case: wrong results are not timed, a failing case does not stop its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quads.bench.cases import Case, Goal, Group, Ready
from quads.bench.measure import Ceilings, during, measure, with_goal
from quads.bench.monitor import Monitor
from quads.bench.results import Against, Conditions, Result


def ready(call: Callable[[], Any] = lambda: None, **more: Any) -> Callable[[Any], Ready]:
    return lambda _: Ready(calls=[call], bytes=100.0, flops=1000.0, peak="fp32", **more)


def measured(*cases: Case, ceilings: Ceilings = Ceilings()) -> list[Any]:  # noqa: B008
    group = Group(op="gemm", shape={"M": 1}, device="cpu", cases=cases, seconds=0.01)
    return list(measure(group, Monitor(), ceilings, "stamp"))


def case(name: str, make: Callable[[Any], Ready], **more: Any) -> Case:
    return Case(numerics="nvfp4", implementation=name, ready=make, **more)


def raises(_: Any) -> Ready:
    raise RuntimeError("no kernel\nfor this shape")


def counted(calls: list[int]) -> Callable[[], None]:
    return lambda: calls.append(1)


def wrong_bytes() -> float:
    raise AssertionError("codes: 3 of 8 bytes differ")


@pytest.mark.parametrize("check", [lambda: 1.5, lambda: float("nan"), wrong_bytes])
def test_a_wrong_result_is_not_timed(check: Callable[[], float]) -> None:
    calls: list[int] = []
    (line,) = measured(case("ours", ready(counted(calls), check=check)))
    assert line["kind"] == "failed"
    assert "wrong result" in line["why"]
    assert "not timed" in line["why"]
    assert not calls


def test_a_case_that_raises_is_one_line_and_the_others_go_on() -> None:
    failed, result = measured(case("broken", raises), case("ours", ready()))
    assert failed == {
        "kind": "failed", "case": "gemm/nvfp4/broken/M=1", "why": "RuntimeError: no kernel for this shape"
    }  # fmt: skip
    assert isinstance(result, Result)


def test_a_peer_that_is_not_installed_is_named_with_its_reason() -> None:
    lines = measured(case("ours", ready()), case("peer", ready(), missing=lambda: "needs peer; it is not installed"))
    assert lines[0] == {"kind": "absent", "peer": "peer", "op": "gemm", "why": "needs peer; it is not installed"}


def test_a_peer_that_does_not_import_is_absent() -> None:
    def broken(_: Any) -> Ready:
        raise ModuleNotFoundError("No module named 'scipy'")

    (line,) = measured(case("peer", broken))
    assert (line["kind"], line["why"]) == ("absent", "ModuleNotFoundError: No module named 'scipy'")


def test_inputs_that_cannot_be_made_fail_the_group_only() -> None:
    group = Group(op="gemm", shape={"M": 1}, device="cpu", cases=(case("ours", ready()),), inputs=lambda: raises(None))
    (line,) = measure(group, Monitor(), Ceilings(), "stamp")
    assert (line["kind"], line["case"]) == ("failed", "gemm/M=1")  # type: ignore[index]


def test_ratios_are_to_the_first_case() -> None:
    first, second = measured(
        case("ours", ready()), case("peer", ready(lambda: torch.randn(200, 200) @ torch.ones(200)))
    )
    assert first.against is None
    assert second.against.case == "gemm/nvfp4/ours/M=1"
    assert second.against.ratio > 1


def test_without_the_first_case_there_is_no_ratio() -> None:
    _, second = measured(case("broken", raises), case("peer", ready()))
    assert second.against is None


def test_shares_are_of_the_ceilings_of_the_run() -> None:
    ceilings = Ceilings(copy=1e9, peaks=(("fp32", 1e10),))
    (result,) = measured(case("ours", ready()), ceilings=ceilings)
    assert result.share_of_copy == pytest.approx(100.0 / result.seconds / 1e9)
    assert result.share_of_matrix_peak == pytest.approx(1000.0 / result.seconds / 1e10)


def test_without_a_ceiling_there_is_no_share() -> None:
    (result,) = measured(case("ours", ready()))
    assert (result.share_of_copy, result.share_of_matrix_peak) == (None, None)


@pytest.mark.parametrize(("bound", "met"), [({"at_least": 0.0}, True), ({"at_most": 0.0}, False)])
def test_a_goal_is_held_against_the_ratio(bound: dict[str, float], met: bool) -> None:
    goal = Goal(text="goal", **bound)
    _, result = measured(case("ours", ready()), case("peer", ready(), goal=goal))
    assert result.goal_met is met


def test_a_goal_on_the_share_of_copy_is_undecided_without_the_ceiling() -> None:
    (result,) = measured(case("ours", ready(), goal=Goal(text="fast", of="share_of_copy", at_least=0.9)))
    assert result.goal_met is None


def test_a_case_throttled_only_in_a_row_keeps_the_reason_but_is_not_marked() -> None:
    rounds = Conditions(sm_clock_mhz=(1900.0, 1900.0, 1980.0), power_w=300.0)
    in_a_row = Conditions(
        sm_clock_mhz=(1400.0, 1500.0, 1980.0), power_w=699.0, throttle=("power cap",), marked="throttled"
    )
    found = during(rounds, in_a_row)
    assert (found.marked, found.throttle, found.power_w) == (None, ("power cap",), 699.0)


def test_groups_draw_different_inputs_and_the_same_ones_again() -> None:
    def drawn(m: int) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        group = Group(
            op="gemm", shape={"M": m}, device="cpu", cases=(case("ours", ready()),), seconds=0.0,
            inputs=lambda: seen.append(torch.randn(4)),
        )  # fmt: skip
        list(measure(group, Monitor(), Ceilings(), "stamp"))
        return seen[0]

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


@pytest.mark.parametrize(
    ("bound", "met"), [({"at_most": 5.0}, True), ({"at_most": 1.5}, False), ({"at_most": 3.0}, None)]
)
def test_a_goal_inside_the_interval_of_a_ratio_is_not_decided(bound: dict[str, float], met: bool | None) -> None:
    against = Against(case="gemm/nvfp4/ours/M=1", implementation="ours", ratio=3.0, low=2.0, high=4.0)
    result = Result(op="gemm", numerics="fp8", implementation="peer", shape={"M": 1}, seconds=1.0, against=against)
    assert with_goal(result, Goal(text="goal", **bound)).goal_met is met
