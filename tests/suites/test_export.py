"""Parquet files hold the records, and their absence of pyarrow is said plainly."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from quads.errors import CannotRunHereError
from quads.suites import export
from tests.suites.made_results import ARMS, append, probe_record, write

parquet = pytest.importorskip("pyarrow.parquet")


def test_every_record_is_a_row_with_its_cell(tmp_path: Path) -> None:
    out = write(tmp_path, ARMS)
    append(out / "probe.jsonl", [probe_record("quads", 0, np.array([0.1, 0.2]))])
    assert [path.name for path in export.write(out)] == ["runs.parquet", "evals.parquet", "probe.parquet"]
    rows = parquet.read_table(out / "runs.parquet").to_pylist()
    assert len(rows) == 3 * 4 * 60 and {row["cell"] for row in rows} == {"plain"}
    assert parquet.read_table(out / "evals.parquet").to_pylist()[0]["eval/correct"].strip("01") == ""
    assert parquet.read_table(out / "probe.parquet").to_pylist()[0]["probe/by_sequence"] == [0.1, 0.2]


def test_a_key_that_some_records_lack_is_null_there(tmp_path: Path) -> None:
    out = write(tmp_path, ARMS)
    path = out / "plain" / "runs.jsonl"
    path.write_text(path.read_text().replace('"reward/mean"', '"memory/peak_gib": 1.5, "reward/mean"', 1))
    export.write(out)
    column = parquet.read_table(out / "runs.parquet")["memory/peak_gib"].to_pylist()
    assert column[0] == 1.5 and set(column[1:]) == {None}


def test_a_suite_without_records_writes_nothing(tmp_path: Path) -> None:
    out = write(tmp_path, ARMS)
    for path in out.glob("plain/*.jsonl"):
        path.unlink()
    assert export.write(out) == []


def test_without_pyarrow_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CannotRunHereError, match=r"pip install 'quads\[rl\]'"):
        export.write(write(tmp_path, ARMS))
