"""Append-only records: whole lines or none, also after a kill and between processes."""

from __future__ import annotations

import errno
import json
import multiprocessing
from pathlib import Path

import pytest

from quads.compare.records import SCHEMA, Records, RecordsError, untimed, write_atomically, write_json


def test_a_record_comes_back_with_the_schema_number(tmp_path: Path) -> None:
    records = Records(tmp_path / "runs.jsonl")
    records.append({"arm": "bf16", "gap/mean": 0.5})
    assert records.read() == [{"schema": SCHEMA, "arm": "bf16", "gap/mean": 0.5}]


def test_a_half_written_last_line_is_not_a_record_and_goes_with_the_next_append(tmp_path: Path) -> None:
    records = Records(tmp_path / "runs.jsonl")
    records.append({"step": 1})
    with records.path.open("a") as handle:
        handle.write('{"schema": 1, "step": 2, "gap/me')
    assert [record["step"] for record in records.read()] == [1]
    records.append({"step": 3})
    assert [record["step"] for record in records.read()] == [1, 3]


def test_keep_says_how_many_records_went_and_whether_a_half_line_did(tmp_path: Path) -> None:
    records = Records(tmp_path / "runs.jsonl")
    for step in (1, 2, 3):
        records.append({"step": step})
    assert records.keep(lambda record: record["step"] < 3) == (1, False)
    with records.path.open("a") as handle:
        handle.write("{")
    assert records.keep(lambda record: True) == (0, True)
    assert [record["step"] for record in records.read()] == [1, 2]
    assert records.path.read_bytes().endswith(b"}\n")


def test_a_broken_line_in_the_middle_is_an_error_that_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"schema": 1}\nnonsense\n{"schema": 1}\n')
    with pytest.raises(RecordsError, match=r"runs\.jsonl line 2 is not JSON"):
        Records(path).read()


def test_a_record_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({"schema": SCHEMA + 1}) + "\n")
    with pytest.raises(RecordsError, match="line 1 has no 'schema'"):
        Records(path).read()


def test_nan_is_never_written(tmp_path: Path) -> None:
    records = Records(tmp_path / "runs.jsonl")
    with pytest.raises(ValueError, match="Out of range float"):
        records.append({"gap/mean": float("nan")})
    assert records.read() == []


def _append_many(path: Path, writer: int) -> None:
    for number in range(25):
        Records(path).append({"writer": writer, "number": number, "filler": "x" * 2000})


def test_two_processes_appending_lose_and_mix_nothing(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(path, writer)) for writer in range(2)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    for writer in range(2):
        numbers = [record["number"] for record in Records(path).read() if record["writer"] == writer]
        assert numbers == list(range(25))


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    with pytest.raises(TypeError):
        write_atomically(path, "text, not bytes")  # type: ignore[arg-type]
    assert json.loads(path.read_text()) == {"old": 1}


def test_untimed_drops_wall_clock_figures_only() -> None:
    assert untimed({"step": 1, "time/step_s": 2.0, "throughput/x": 3.0, "gap/mean": 4.0}) == {
        "step": 1,
        "gap/mean": 4.0,
    }


def test_a_full_disk_leaves_the_old_file_and_no_half_written_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    write_atomically(path, b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
