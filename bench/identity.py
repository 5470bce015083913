"""The stamp of a benchmark run and its key: what decides a number, and so which results need no second measurement."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from quads import provenance
from quads.compare.records import Record

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("emulation", "kernels", "quads", "bench")


def stamp() -> Record:
    """The project's stamp, with a digest of the `sources` and the key `stamp` that results carry."""
    found = {**provenance.stamp(), "sources": sources_digest()}
    return {**found, "stamp": key(found)}


def sources_digest() -> str:
    """SHA-256 over the project's own source files: the same sources give the same cases, committed or not."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).glob("**/*")):
            if path.suffix in (".py", ".cu", ".cuh", ".toml") and path.is_file():
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def key(stamp: Record) -> str:
    """Short key of what decides a number: sources, versions, processor, GPU, driver and threads."""
    decides = {key: stamp[key] for key in ("sources", "versions", "python", "cpu", "threads", "gpu")}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
