"""Two probes agree only where they scored the same tokens."""

from pathlib import Path

import pytest

from quads.compare.records import Record, Records
from quads.errors import CannotRunHereError
from quads.suites.probe_agreement import agree, main


def record(arm: str, gaps: list[float], **changes: object) -> Record:
    mean = sum(gaps) / len(gaps)
    fixed = {
        "policy": "start",
        "outliers": "",
        "reference": "bf16",
        "draw": 0,
        "identity": "a",
        "label": "emulated (CPU)",
    }
    return {**fixed, "arm": arm, "probe/gap_mean": mean, "probe/by_sequence": gaps, **changes}


def write(folder: Path, *records: Record) -> Path:
    folder.mkdir()
    for one in records:
        Records(folder / "probe.jsonl").append(one)
    return folder


def test_each_arm_has_its_ratio_and_correlation(tmp_path: Path) -> None:
    ours = write(tmp_path / "a", record("nvfp4", [1.0, 2.0, 3.0]), record("w4a16", [0.0, 0.0, 0.0]))
    theirs = write(tmp_path / "b", record("nvfp4", [2.0, 3.0, 4.0]), record("w4a16", [0.0, 0.0, 0.0]))
    nvfp4, w4a16 = agree(ours, theirs)
    assert (nvfp4.ratio, nvfp4.correlation, nvfp4.sequences) == (1.5, pytest.approx(1.0), 3)
    assert (w4a16.ratio, w4a16.correlation) == (1.0, 1.0)


def test_a_gap_on_one_side_only_is_no_agreement(tmp_path: Path) -> None:
    ours = write(tmp_path / "a", record("w4a16", [0.0, 0.0]))
    theirs = write(tmp_path / "b", record("w4a16", [0.0, 0.1]))
    assert agree(ours, theirs)[0].ratio == float("inf")


def test_other_tokens_are_not_compared(tmp_path: Path) -> None:
    ours = write(tmp_path / "a", record("nvfp4", [1.0, 2.0]))
    theirs = write(tmp_path / "b", record("nvfp4", [1.0, 2.0], identity="b"), record("nvfp4", [1.0, 2.0], draw=1))
    with pytest.raises(CannotRunHereError, match="share no record of the same policy and tokens"):
        agree(ours, theirs)


def test_the_table_names_both_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = write(tmp_path / "a", record("nvfp4", [1.0, 2.0]))
    theirs = write(tmp_path / "b", record("nvfp4", [1.0, 2.0], label="measured (NVIDIA H200)"))
    main([str(ours), str(theirs)])
    out = capsys.readouterr().out
    assert "gap, emulated (CPU) | gap, measured (NVIDIA H200)" in out
    assert "| start |  | nvfp4 | bf16 | 1.50000 | 1.50000 | 1.000 | 1.000 |" in out
