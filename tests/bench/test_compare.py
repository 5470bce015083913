"""Two runs compared: the factor and the intervals both, on one class of machine, with what fell named."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from quads.bench.compare import FACTOR, Comparison, compare
from quads.bench.results import Conditions, Result
from quads.compare.records import RecordsError
from quads.errors import CannotRunHereError, GateFailedError
from tests.bench.bench_run import write_run

SHAPE = {"M": 16, "N": 8192, "K": 8192}
BASE = Result(
    op="gemm", numerics="nvfp4", implementation="quads.kernels", shape=SHAPE, seconds=100e-6, seconds_low=99e-6,
    seconds_high=101e-6,
)  # fmt: skip


def moved(factor: float, width: float = 0.01, **more: object) -> Result:
    took = BASE.seconds * factor
    return dataclasses.replace(
        BASE, seconds=took, seconds_low=took * (1 - width), seconds_high=took * (1 + width), **more
    )  # type: ignore[arg-type]


def pair(tmp_path: Path, new: Result, **more: str | None) -> Comparison:
    return compare(write_run(tmp_path / "base", [BASE]), write_run(tmp_path / "new", [new], **more))


def test_slower_beyond_factor_and_intervals_is_a_regression_that_is_named(tmp_path: Path) -> None:
    found = pair(tmp_path, moved(1.2))
    assert [change.case for change in found.regressions] == [BASE.case]
    with pytest.raises(GateFailedError, match=f"{BASE.case} 1.20x"):
        found.check()


def test_slower_within_the_factor_is_not(tmp_path: Path) -> None:
    found = pair(tmp_path, moved(FACTOR - 0.01, width=0.001))
    assert not found.regressions
    found.check()


def test_slower_with_overlapping_intervals_is_not(tmp_path: Path) -> None:
    assert not pair(tmp_path, moved(1.2, width=0.3)).regressions


def test_faster_is_an_improvement(tmp_path: Path) -> None:
    found = pair(tmp_path, moved(0.8))
    assert [change.case for change in found.improvements] == [BASE.case]
    assert not found.regressions


def test_a_throttled_run_decides_nothing(tmp_path: Path) -> None:
    found = pair(tmp_path, moved(1.5, conditions=Conditions(marked="throttled")))
    assert not found.regressions
    assert [change.marked for change in found.undecided] == ["new throttled"]


def test_another_class_of_gpu_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(CannotRunHereError, match=r"NVIDIA H200.*NVIDIA B200"):
        pair(tmp_path, moved(1.0), gpu="NVIDIA B200")


def test_runs_without_a_common_case_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(CannotRunHereError, match="no measured case in common"):
        pair(tmp_path, dataclasses.replace(BASE, numerics="bf16"))


def test_cases_of_one_run_only_are_named(tmp_path: Path) -> None:
    other = dataclasses.replace(BASE, numerics="bf16")
    found = compare(write_run(tmp_path / "base", [BASE, other]), write_run(tmp_path / "new", [moved(1.0)]))
    assert found.gone == (other.case,)
    assert found.added == ()


def test_predictions_are_not_compared(tmp_path: Path) -> None:
    modelled = dataclasses.replace(BASE, label="modelled", chip="B200")
    slower = dataclasses.replace(moved(3.0), label="modelled", chip="B200")
    found = compare(write_run(tmp_path / "base", [BASE, modelled]), write_run(tmp_path / "new", [moved(1.0), slower]))
    assert len(found.changes) == 1


def test_a_results_file_may_be_named_itself(tmp_path: Path) -> None:
    base, new = write_run(tmp_path / "base", [BASE]), write_run(tmp_path / "new", [moved(1.0)])
    assert compare(base / "results.jsonl", new / "results.jsonl").changes == compare(base, new).changes


def test_a_broken_file_names_its_line(tmp_path: Path) -> None:
    base, new = write_run(tmp_path / "base", [BASE]), write_run(tmp_path / "new", [moved(1.0)])
    with (new / "results.jsonl").open("a") as handle:
        handle.write("{broken\n")
    with pytest.raises(RecordsError, match=r"results\.jsonl"):
        compare(base, new)


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"results\.jsonl does not exist"):
        compare(tmp_path / "nothing", write_run(tmp_path / "new", [BASE]))


def test_a_file_of_two_machines_is_refused(tmp_path: Path) -> None:
    base = write_run(write_run(tmp_path / "base", [BASE]), [BASE], gpu="NVIDIA B200")
    with pytest.raises(ValueError, match="results of 2 machines"):
        compare(base, write_run(tmp_path / "new", [BASE]))


def test_the_terminal_shows_what_fell_and_the_counts(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(pair(tmp_path, moved(1.2)).render())
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Slower beyond the noise" in said and BASE.case in said and "1.20x" in said
    assert "1 cases on NVIDIA H200: 1 slower, 0 faster" in said
