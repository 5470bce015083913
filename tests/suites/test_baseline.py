"""The committed baseline is one of the suite as it stands, so that CI can compare with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quads.errors import GateFailedError
from quads.suites import config, gates

CI = Path(__file__).parents[2] / "suites" / "ci"


@pytest.fixture(scope="module")
def baseline() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CI / "baseline.json").read_text("utf-8"))
    return found


def test_it_belongs_to_the_suite_as_it_stands(baseline: dict[str, Any]) -> None:
    assert baseline["identity"] == config.load("ci").identity, "run the suite again and commit its summary"
    assert baseline["label"] == "emulated (CPU)"


def test_it_is_finished_and_bf16_learned(baseline: dict[str, Any]) -> None:
    suite = config.load("ci")
    assert [entry["learned"] for entry in baseline["learned"]] == [True]
    assert {(entry["arm"], entry["finished"]) for entry in baseline["outcomes"]} == {
        (a, suite.seeds) for a in suite.arms
    }
    assert suite.probe and {entry["draws"] for entry in baseline["probe"]} == {suite.probe.draws}


def test_its_stamp_says_where_it_was_made(baseline: dict[str, Any]) -> None:
    stamp = json.loads((CI / "baseline-stamp.json").read_text("utf-8"))
    assert (
        stamp["git"]["sha"] and stamp["git"]["dirty"] is False and stamp["gpu"] is None and stamp["seeds"] == [0, 1, 2]
    )


def test_a_planted_fall_would_fail_against_it(tmp_path: Path, baseline: dict[str, Any]) -> None:
    (entry,) = [entry for entry in baseline["outcomes"] if entry["arm"] == "quads"]
    entry["accuracy"] = {key: value - 0.2 for key, value in entry["accuracy"].items()}
    (tmp_path / "summary.json").write_text(json.dumps(baseline))
    with pytest.raises(GateFailedError, match="accuracy of quads in plain"):
        gates.check(CI / "baseline.json", tmp_path)
