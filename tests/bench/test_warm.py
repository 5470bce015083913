"""Other processes run checks and compile: their outcome is a line, what raises stops nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quads.bench import cases, warm
from quads.bench.cases import Case, Group, Ready
from quads.bench.results import ResultsFile


def right() -> Iterator[str]:
    yield "M=1"
    yield "M=7"


def wrong() -> Iterator[str]:
    yield "M=1"
    raise AssertionError("M=7: 3.00 times the bound")


def test_the_outcome_of_a_check_holds_what_it_compared() -> None:
    found = warm.outcome(right)
    assert (found["name"], found["passed"], found["compared"]) == ("right", True, ["M=1", "M=7"])


def test_a_check_that_fails_says_why_and_how_far_it_came() -> None:
    found = warm.outcome(wrong)
    assert (found["passed"], found["compared"]) == (False, ["M=1"])
    assert "3.00 times the bound" in found["why"]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the groups that were called; one of them raises."""
    names: list[str] = []

    def ready(name: str) -> Any:
        def make(_: Any) -> Ready:
            if name == "b":
                raise RuntimeError("does not compile")
            return Ready(calls=[lambda: names.append(name)], bytes=1.0)

        return make

    def catalogue(device: str) -> Iterator[Group]:
        for name in "abcd":
            case = Case(numerics="nvfp4", implementation=name, ready=ready(name))
            yield Group(op="gemm", shape={"M": ord(name)}, device=device, cases=(case,), quick=True)

    monkeypatch.setattr(cases, "catalogue", catalogue)
    monkeypatch.setattr(warm, "checks", lambda device: {"gemm": right, "moe": wrong})
    return names


def test_shares_together_call_every_group_once_and_run_each_wanted_check_once(
    tmp_path: Path, called: list[str]
) -> None:
    file = ResultsFile(tmp_path)
    assert sum(warm.share(file, "key", index, 3, [], False) for index in range(3)) == 3
    assert sorted(called) == ["a", "c", "d"]
    assert [(line["name"], line["stamp"]) for line in file.records("check")] == [("right", "key")]
