"""The verbs of suites: what they accept, what they print, and their exit codes."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quads import cli, cli_suite
from quads.errors import CannotRunHereError
from quads.suites import runner
from quads.suites.runner import Options, Outcome
from tests.suites import made_results
from tests.suites.running import suite


def _quads(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit code of `quads suite ...`."""
    monkeypatch.setattr(sys, "argv", ["quads", "suite", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_list_names_every_shipped_suite_with_its_question() -> None:
    said = CliRunner().invoke(cli.app, ["suite", "list"]).output
    assert "h200-small" in said and "probe only" in said and "Does BF16" in said


@pytest.mark.parametrize(("text", "value"), [("90s", 90.0), ("9m", 540.0), ("1h", 3600.0), ("", math.inf), ("0", 0.0)])
def test_a_budget_is_seconds_minutes_or_hours(text: str, value: float) -> None:
    assert cli_suite._limit(text) == value


def test_seeds_are_ranges_and_numbers() -> None:
    assert cli_suite._seeds("0-2,5") == (0, 1, 2, 5)
    with pytest.raises(ValueError, match="--seeds 'a-b' is no list of seeds"):
        cli_suite._seeds("a-b")


def test_changes_are_toml_values_or_text() -> None:
    given = cli_suite._changes(["settings.steps=3", "settings.start=small", "probe.outliers=['', '8x16']"])
    assert given == {"settings.steps": 3, "settings.start": "small", "probe.outliers": ["", "8x16"]}
    with pytest.raises(ValueError, match="'steps' is not KEY=VALUE"):
        cli_suite._changes(["steps"])


def test_run_hands_everything_to_the_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(chosen: Any, out: Path, options: Options) -> Outcome:
        seen.update(steps=chosen.settings["steps"], out=out, options=options)
        return Outcome()

    monkeypatch.setattr(runner, "run", run)
    suite(tmp_path)
    arguments = [
        str(tmp_path / "suite"),
        "--out",
        str(tmp_path / "o"),
        "--budget",
        "9m",
        "--workers",
        "3",
        "--arms",
        "quads",
    ]
    arguments += ["--seeds", "0-1", "--set", "settings.steps=7", "--report-to", "trackio", "--probe", "0"]
    assert _quads("run", *arguments, monkeypatch=monkeypatch) == 0
    assert (seen["steps"], seen["out"]) == (7, tmp_path / "o")
    assert seen["options"] == Options(540.0, 3, ("quads",), (0, 1), "trackio", 0.0)


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (Outcome(failed={"slow/bf16-seed0": "CUDA error"}), 1),
        (ValueError("field 'x' is 1"), 2),
        (CannotRunHereError("no space left"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_how_a_run_ends_is_the_exit_code(ended: Any, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(chosen: Any, out: Path, options: Options) -> Outcome:
        if isinstance(ended, Outcome):
            return ended
        raise ended

    monkeypatch.setattr(runner, "run", run)
    assert _quads("run", "ci", monkeypatch=monkeypatch) == code


def test_bad_input_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for arguments, says in (
        (["run", "nope"], "no suite 'nope'"),
        (["run", "ci", "--set", "settings.stepz=3"], "did you mean 'steps'"),
        (["run", "ci", "--arms", "qqq"], "has no arm qqq"),
        (["run", "ci", "--budget", "soon"], "is no time"),
    ):
        assert _quads(*arguments, "--out", str(out), monkeypatch=monkeypatch) == 2
        assert says in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_report_wants_a_folder_that_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _quads("report", monkeypatch=monkeypatch) == 2
    assert _quads("report", str(tmp_path), monkeypatch=monkeypatch) == 2


def test_report_leaves_the_summary_of_a_folder_without_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = made_results.write(tmp_path)
    assert _quads("report", str(out), monkeypatch=monkeypatch) == 0
    before = (out / "summary.json").read_bytes()
    for path in out.glob("plain/*.jsonl"):
        path.unlink()
    assert _quads("report", str(out), monkeypatch=monkeypatch) == 2
    assert "holds no records" in " ".join(capsys.readouterr().err.split())
    assert (out / "summary.json").read_bytes() == before


def test_problems_are_exported_for_every_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    suite(tmp_path)
    file = tmp_path / "p.jsonl"
    assert _quads("problems", str(tmp_path / "suite"), "--out", str(file), monkeypatch=monkeypatch) == 0
    assert len(file.read_text().splitlines()) == 16 + 2 * 3 * 4  # held out, and steps x prompts of two seeds
