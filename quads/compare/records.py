"""Append-only JSONL that survives `kill -9`, shared by several processes; JSON documents written whole or not at all.

A record is one flat object on one line with a `schema` number and `group/name` keys. Appending takes a lock, drops a
half-written last line (a killed writer's), writes one line and syncs it. Groups in `TIMED` hold wall-clock figures and
peak memory: everything else of a record is the same when a run is repeated or resumed on the same machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

SCHEMA = 1
TIMED = ("time/", "throughput/", "memory/")

Record = dict[str, Any]


class RecordsError(ValueError):
    """A results file that cannot be read; the message names file and line."""


class Records:
    """One JSONL file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Workers of a suite append to one file: waiting longer than a write takes would idle them.
        self._lock = FileLock(path.with_name(f".{path.name}.lock"), poll_interval=0.005)

    def append(self, record: Record) -> None:
        """Add one record durably: after a crash the file holds all of it or none of it."""
        line = json.dumps({"schema": SCHEMA, **record}, allow_nan=False).encode() + b"\n"
        with self._lock:
            self._drop_half_line()
            with self.path.open("ab") as handle:
                handle.write(line)
                handle.flush()
                os.fsync(handle.fileno())

    def read(self) -> list[Record]:
        """Every whole record; a half-written last line is not one. RecordsError for a broken line before it."""
        if not self.path.exists():
            return []
        return parse(self.path, self.path.read_bytes())

    def keep(self, wanted: Callable[[Record], bool]) -> tuple[int, bool]:
        """Drop the records that `wanted` refuses; returns how many, and whether a half-written line went too."""
        with self._lock:
            half = self._drop_half_line()
            records = self.read()
            kept = [record for record in records if wanted(record)]
            if len(kept) < len(records):
                write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        return len(records) - len(kept), half

    def _drop_half_line(self) -> bool:
        if not self.path.exists():
            return False
        with self.path.open("rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(max(0, size - 1))
            if size == 0 or handle.read() == b"\n":
                return False
        os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
        return True


def parse(path: Path, content: bytes) -> list[Record]:
    """The whole records of the `content` of `path`. RecordsError for a broken line."""
    return [_parse(path, number, line) for number, line in enumerate(content.split(b"\n")[:-1], 1)]


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document whole or not at all."""
    write_atomically(path, (json.dumps(document, indent=1) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`: a reader, or a crash, sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError:  # a full disk, say: the old file stays, and what was half written gives its space back
        temporary.unlink(missing_ok=True)
        raise


def untimed(record: Record) -> Record:
    """The part of a record that a repeated run gives again."""
    return {key: value for key, value in record.items() if not key.startswith(TIMED)}


def _parse(path: Path, number: int, line: bytes) -> Record:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise RecordsError(f"{path} line {number} is not JSON: remove the line, or choose another --out") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise RecordsError(f"{path} line {number} has no 'schema': {SCHEMA}; choose another --out")
    return record
