"""Results are written line by line and read back whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quads.bench.results import Against, Conditions, Result, ResultsFile, result
from quads.compare.records import RecordsError

GEMM = Result(
    op="gemm", numerics="quads", variant="static", implementation="quads.kernels", shape={"M": 16, "N": 64, "K": 128},
    seconds=2e-5, seconds_low=1.9e-5, seconds_high=2.1e-5, interval="95 % of the median", samples=(2e-5, 2.1e-5),
    conditions=Conditions(sm_clock_mhz=(1700.0, 1900.0, 1980.0), throttle=("power",), marked="throttled"),
    against=Against(case="gemm/nvfp4/quads.kernels/M=16", implementation="quads.kernels", ratio=1.2, low=1.1, high=1.3),
)  # fmt: skip


def test_a_result_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path)
    file.append(GEMM)
    assert list(file.results()) == [GEMM]


def test_the_case_names_operation_numerics_implementation_and_shape() -> None:
    assert GEMM.case == "gemm/quads/static/quads.kernels/M=16,N=64,K=128"


def test_a_line_is_flat_but_for_shape_samples_conditions_and_against(tmp_path: Path) -> None:
    ResultsFile(tmp_path).append(GEMM)
    line = json.loads((tmp_path / "results.jsonl").read_text())
    nested = {key for key, value in line.items() if isinstance(value, dict | list)}
    assert nested == {"shape", "samples", "conditions", "against"}
    assert line["schema"] == 1


def test_the_later_of_two_lines_of_a_case_counts(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path)
    for seconds in (2.0, 3.0):
        file.append({**GEMM.record(), "seconds": seconds})
    assert [r.seconds for r in file.results()] == [3.0]


def test_lines_of_other_kinds_are_not_results(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path)
    file.append({"kind": "stamp", "stamp": "a"})
    file.append({"kind": "absent", "peer": "vllm", "why": "not installed"})
    assert list(file.results()) == []
    assert file.stamps()[0]["stamp"] == "a"


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(RecordsError, match="field 'colour' is not known"):
        result({**GEMM.record(), "colour": "red"})


def test_an_unknown_label_is_refused() -> None:
    with pytest.raises(RecordsError, match="label 'guessed' is unknown"):
        result({**GEMM.record(), "label": "guessed"})


def test_a_folder_without_results_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="quads bench run"):
        ResultsFile(tmp_path).records()


def test_what_was_modelled_before_is_replaced_and_what_was_measured_stays(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path)
    file.append(GEMM)
    for seconds in (1.0, 2.0):
        assert file.replace_modelled([replace(GEMM, label="modelled", seconds=seconds, chip="B200")]) == 1
    assert [(r.label, r.seconds) for r in file.results()] == [("measured", 2e-5), ("modelled", 2.0)]
