"""Parquet copies of a suite's records, a file each for training steps, evaluations, the probe and its layers.

The JSONL files stay the results; these are for data frames. A column holds one type; keys that a record lacks are null.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from quads.compare.records import Record, write_atomically
from quads.errors import CannotRunHereError
from quads.suites.results import read_json, records, suite_from_dict

CELL = "cell"  # the column that says which comparison a record is of


def write(out: Path) -> list[Path]:
    """Write runs, evals, failures, probe and layers.parquet of the suite's folder `out`, as far as it has records.

    CannotRunHereError without pyarrow.
    """
    document = read_json(out / "suite.json")
    cells = [cell.name for cell in suite_from_dict(document.get("suite", document)).cells(out)]
    tables = {name: _of_cells(out, cells, name) for name in ("runs", "evals", "failures")}
    probe = records(out / "probe.jsonl")
    tables["probe"] = [record for record in probe if record.get("kind", "probe") == "probe"]
    tables["layers"] = [record for record in probe if record.get("kind") == "layer"]
    return [_write(out / f"{name}.parquet", table) for name, table in tables.items() if table]


def _of_cells(out: Path, cells: list[str], name: str) -> list[Record]:
    return [{CELL: cell, **record} for cell in cells for record in records(out / cell / f"{name}.jsonl")]


def _write(path: Path, records: list[Record]) -> Path:
    arrow, parquet = _pyarrow()
    columns = dict.fromkeys(key for record in records for key in record)
    table = arrow.table({key: [record.get(key) for record in records] for key in columns})
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    write_atomically(path, buffer.getvalue())
    return path


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise CannotRunHereError("parquet needs pyarrow: python -m pip install 'quads[rl]'") from None
    return pyarrow, pyarrow.parquet
