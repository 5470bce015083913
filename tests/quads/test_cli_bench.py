"""`quads bench`: budgets, exit codes, and one line for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quads.bench.results import Result, ResultsFile
from quads.cli_bench import seconds


def quads(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quads.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("text", "value"), [("480", 480), ("90s", 90), ("8m", 480), ("1.5h", 5400), ("", None)])
def test_a_budget_is_read_in_seconds_minutes_or_hours(text: str, value: float | None) -> None:
    assert seconds(text) == value


def test_a_budget_that_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="--budget 'soon' is no time"):
        seconds("soon")


def test_an_unknown_operation_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    run = quads("run", "--out", str(tmp_path / "out"), "--only", "gem")
    assert run.returncode == 2
    assert run.stderr.strip().startswith("quads: --only 'gem' is no operation (known: ceiling, gemm,")
    assert not (tmp_path / "out").exists()


def test_a_wanted_gpu_that_is_missing_is_exit_code_3(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    run = quads("run", "--out", str(tmp_path), "--device", "cuda")
    assert (run.returncode, run.stderr.strip()) == (3, "quads: --device cuda: torch finds no CUDA GPU here")


def test_a_report_of_a_folder_without_results_is_exit_code_2(tmp_path: Path) -> None:
    run = quads("report", str(tmp_path))
    assert run.returncode == 2
    assert "run `quads bench run" in run.stderr


def test_the_model_needs_no_gpu_and_no_measurement(tmp_path: Path) -> None:
    run = quads("model", "--out", str(tmp_path), "--chips", "B200", "--no-report")
    assert run.returncode == 0, run.stderr
    assert {r.chip for r in ResultsFile(tmp_path).results()} == {"B200"}


def test_an_unknown_chip_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    run = quads("model", "--out", str(tmp_path / "out"), "--chips", "B2000")
    assert (run.returncode, len(run.stderr.strip().splitlines())) == (2, 1)
    assert "B2000" in run.stderr


def test_a_slower_run_is_exit_code_1_and_names_the_case(tmp_path: Path) -> None:
    case = Result(
        op="gemm",
        numerics="nvfp4",
        implementation="ours",
        shape={"M": 1},
        seconds=1.0,
        seconds_low=0.9,
        seconds_high=1.1,
    )
    for name, factor in (("base", 1.0), ("new", 2.0)):
        (tmp_path / name).mkdir()
        file = ResultsFile(tmp_path / name)
        file.append({"kind": "stamp", "stamp": name, "cpu": "a processor", "gpu": None})
        slower = {"seconds": factor, "seconds_low": 0.9 * factor, "seconds_high": 1.1 * factor}
        file.append(replace(case, **slower))
    run = quads("compare", str(tmp_path / "base"), str(tmp_path / "new"))
    assert run.returncode == 1
    assert "slower beyond the noise: gemm/nvfp4/ours/M=1 2.00x" in run.stderr
    assert quads("compare", str(tmp_path / "base"), str(tmp_path / "base")).returncode == 0


def test_rollouts_are_added_with_a_stamp_of_their_own(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path)
    file.append({"kind": "stamp", "stamp": "run", "cpu": "a processor", "gpu": None})
    arms = {"throughput": {"nvfp4": {"tokens_per_s": {"32": 4096.0}}}}
    document = {"options": {"layers": 8}, "stamp": {"cpu": "another"}, "results": arms}
    (tmp_path / "vllm.json").write_text(json.dumps(document))
    run = quads("add-rollouts", str(tmp_path), str(tmp_path / "vllm.json"))
    assert run.returncode == 0, run.stderr
    (rollout,) = file.results()
    assert (rollout.op, rollout.seconds) == ("rollout", 1.0)
    assert [stamp["stamp"] for stamp in file.stamps()] == ["run"]
    assert rollout.stamp in {record["stamp"] for record in file.records("stamp")}


def test_one_operation_runs_from_the_command_line_and_leaves_results(tmp_path: Path) -> None:
    run = quads("run", "--out", str(tmp_path), "--only", "outer_scale", "--quick", "--no-report", "--device", "cpu")
    assert run.returncode == 0, run.stderr
    assert "outer_scale/nvfp4/tensor/quads.emulation/M=256,K=1024" in run.stdout
    assert (tmp_path / "results.jsonl").is_file()
