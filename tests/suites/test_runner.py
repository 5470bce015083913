"""A suite end to end, small: its files, and what it survives."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from quads.suites import folder
from quads.suites.config import SuiteError
from quads.suites.runner import Options
from tests.suites.running import records, run, spawn

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    place = tmp_path_factory.mktemp("whole")
    outcome, said = run(place)
    assert (outcome.finished, outcome.wanted, outcome.failed) == (4, 4, {})
    assert "all 4 runs are finished" in said
    return place


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "copied")
    return tmp_path / "copied"


def test_every_run_of_every_cell_has_its_records_and_checkpoint(whole: Path) -> None:
    runs = records(whole)
    assert [(r["arm"], r["seed"], r["step"]) for r in runs] == [
        (arm, seed, step) for arm in ("bf16", "quads") for seed in (0, 1) for step in (1, 2, 3)
    ]
    assert {r["step"] for r in records(whole, "evals.jsonl")} == {0, 2, 3}
    assert len(list((whole / "out").glob("*/arms/*/state.safetensors"))) == 4


def test_the_folder_says_whose_it_is_and_the_hashes_of_what_it_holds(whole: Path) -> None:
    document = json.loads((whole / "out" / "suite.json").read_text())
    assert document["suite"]["name"] == "suite" and len(document["identity"]) == 12
    assert {"slow/runs.jsonl", "slow/evals.jsonl", "summary.json"} <= document["manifest"].keys()
    assert folder.changed(whole / "out") == []


def test_a_file_that_was_changed_since_is_named(copied: Path) -> None:
    path = copied / "out" / "slow" / "runs.jsonl"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 5', 1))
    assert folder.changed(copied / "out") == ["slow/runs.jsonl"]


def test_a_finished_suite_runs_nothing_again(copied: Path) -> None:
    before = (copied / "out" / "slow" / "runs.jsonl").read_bytes()
    for state in (copied / "out").glob("*/arms/*/state.safetensors"):
        state.unlink()  # results that came back from another machine without their checkpoints
    outcome, _ = run(copied)
    assert outcome.finished == 4 and (copied / "out" / "slow" / "runs.jsonl").read_bytes() == before


def test_a_killed_suite_goes_on_to_the_records_of_an_uninterrupted_one(whole: Path, tmp_path: Path) -> None:
    process = spawn(tmp_path)
    try:
        deadline = time.monotonic() + 400
        while not list((tmp_path / "out").glob("*/arms/*/state.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 0 < len(records(tmp_path)) < 12
    outcome, _ = run(tmp_path)
    assert outcome.finished == 4
    assert records(tmp_path) == records(whole)
    assert records(tmp_path, "evals.jsonl") == records(whole, "evals.jsonl")


def test_a_budget_stops_after_a_step_and_says_how_to_go_on(whole: Path, tmp_path: Path) -> None:
    outcome, said = run(tmp_path, Options(workers=1, budget=0.5))
    assert outcome.finished < 4 and not outcome.failed
    assert "of 4 runs are unfinished: the same command goes on" in said
    outcome, _ = run(tmp_path)
    assert outcome.finished == 4 and records(tmp_path) == records(whole)


def test_a_half_written_record_is_dropped_and_said(copied: Path) -> None:
    path = copied / "out" / "slow" / "runs.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + b'{"schema": 1, "arm": "qu')
    _, said = run(copied)
    assert "slow/runs.jsonl ended in a half-written record: dropped" in said
    assert path.read_bytes() == before


def test_another_suite_is_refused_with_the_keys_that_differ(copied: Path) -> None:
    before = (copied / "out" / "suite.json").read_bytes()
    with pytest.raises(SuiteError, match=r"holds another suite \(settings\.steps: 3 -> 4\)"):
        run(copied, **{"settings.steps": 4})
    assert (copied / "out" / "suite.json").read_bytes() == before


def test_more_seeds_join_a_folder(copied: Path) -> None:
    outcome, _ = run(copied, Options(workers=1, arms=("bf16",), seeds=(2,), budget=0.5), seeds=3)
    assert outcome.wanted == 1
    assert json.loads((copied / "out" / "suite.json").read_text())["suite"]["seeds"] == 3


def test_a_broken_line_is_refused_with_its_number(copied: Path) -> None:
    path = copied / "out" / "slow" / "evals.jsonl"
    path.write_bytes(b"nonsense\n" + path.read_bytes())
    with pytest.raises(ValueError, match=r"evals\.jsonl line 1 is not JSON"):
        run(copied)
