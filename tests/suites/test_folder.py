"""A folder keeps the label of the machine that trained, whoever finishes it, and takes no training of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quads import provenance
from quads.compare.records import write_json
from quads.suites import folder, report, results, summary
from quads.suites.config import SuiteError
from tests.suites.made_results import ARMS, append, probe_record, suite, write

H200 = "measured (NVIDIA H200)"


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Training records of a GPU machine, without states, on this machine."""
    out = write(tmp_path / "out", ARMS)
    write_json(out / "stamp.json", {"gpu": {"name": "NVIDIA H200"}, "command": "there"})
    return out


def on_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(provenance, "gpu", lambda: {"name": name})


def test_summary_of_a_gpu_machines_results_keeps_their_label(measured: Path) -> None:
    assert summary.write(measured)["label"] == H200


def test_a_finished_folder_keeps_its_label_however_often_it_is_finished_elsewhere(measured: Path) -> None:
    folder.claim(suite(ARMS), measured, trains=False)
    folder.claim(suite(ARMS), measured, trains=False)
    found = results.load(measured)
    assert found.label == H200 and [stamp["gpu"] for stamp in found.stamp["later"]] == [None, None]
    assert report._commands(found.stamp)[0] == "there" and "later" not in report._plain(found.stamp)


@pytest.mark.parametrize(("gpu", "says"), [("", r"emulated \(CPU\)"), ("NVIDIA B200", r"measured \(NVIDIA B200\)")])
def test_training_does_not_go_on_on_another_machine(
    measured: Path, monkeypatch: pytest.MonkeyPatch, gpu: str, says: str
) -> None:
    if gpu:
        on_gpu(monkeypatch, gpu)
    before = (measured / "stamp.json").read_bytes(), (measured / "suite.json").read_bytes()
    with pytest.raises(SuiteError, match=rf"training records measured \(NVIDIA H200\), this machine's are {says}"):
        folder.claim(suite(ARMS), measured)
    assert before == ((measured / "stamp.json").read_bytes(), (measured / "suite.json").read_bytes())


def test_training_of_a_cpu_does_not_become_that_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write(tmp_path, ARMS)
    on_gpu(monkeypatch, "NVIDIA H200")
    with pytest.raises(SuiteError, match=r"training records emulated \(CPU\), this machine's are measured"):
        folder.claim(suite(ARMS), out)


def test_training_goes_on_on_a_machine_of_the_same_kind(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.claim(suite(ARMS), measured, trains=False)
    on_gpu(monkeypatch, "NVIDIA H200")
    folder.claim(suite(ARMS), measured)
    found = results.load(measured)
    assert found.label == H200 and "later" not in found.stamp
    assert [(stamp["gpu"] or {}).get("name") for stamp in found.stamp["earlier"]] == ["NVIDIA H200", None]


def test_a_folder_without_records_is_any_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.claim(suite(ARMS), tmp_path)
    on_gpu(monkeypatch, "NVIDIA H200")
    folder.claim(suite(ARMS), tmp_path, trains=False)
    assert results.load(tmp_path).label == H200


def test_a_probe_of_another_machine_is_noted(measured: Path) -> None:
    assert not any("probe" in line for line in summary.write(measured)["noted"])
    other: dict[str, Any] = {"label": H200}
    append(measured / "probe.jsonl", [probe_record("bf16", 0, np.ones(2), **other)])
    assert not any("probe" in line for line in summary.write(measured)["noted"])
    append(measured / "probe.jsonl", [probe_record("quads", 0, np.ones(2))])
    assert f"records of the probe are emulated (CPU), where the rest is {H200}" in summary.write(measured)["noted"]
