"""The result folder of a suite: whose it is (suite.json), on what it was made (stamp.json), hashes of its files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quads import provenance
from quads.compare import job as comparison
from quads.compare.config import differences
from quads.compare.records import Records, write_json
from quads.suites.config import Suite, SuiteError
from quads.suites.results import label_of, read_json, records, suite_from_dict

SCHEMA = 1
_DECIDES = ("name", "arms", "settings", "variants", "corrections", "probe")  # `seeds` may grow
RECORDS = ("runs.jsonl", "evals.jsonl", "failures.jsonl")


def claim(suite: Suite, out: Path, *, trains: bool = True) -> list[str]:
    """Make `out` the folder of `suite`, every cell included; returns what was repaired, in one line each.

    trains: whether this run will add training records. SuiteError, with the differing keys, where the folder holds
    another suite's results, or where records of one GPU (or of a CPU) would join those of another.
    """
    if out.exists() and not out.is_dir():
        raise SuiteError(f"{out} is a file: name a folder")
    path = out / "suite.json"
    document = suite.to_dict()
    if path.exists():
        old = suite_from_dict(read_json(path)["suite"]).to_dict()  # what it does not name has its default
        changed = differences(_deciding(old), _deciding(document))
        if changed:
            raise SuiteError(f"{out} holds another suite ({'; '.join(changed)}): choose another --out")
        document["seeds"] = max(old["seeds"], suite.seeds)
    for cell in suite.cells(out):
        comparison.check_folder(cell.compare)
    stamp = _stamp(suite, out, trains)
    out.mkdir(parents=True, exist_ok=True)
    noted = _repair(suite, out)
    for cell in suite.cells(out) if trains else ():
        comparison.claim(cell.compare)
    write_json(path, {"schema": SCHEMA, "identity": suite.identity, "suite": document, "manifest": manifest(out)})
    write_json(out / "stamp.json", stamp)
    return noted


def seal(suite: Suite, out: Path) -> None:
    """Write the hashes of every result file into suite.json."""
    write_json(out / "suite.json", {**read_json(out / "suite.json"), "manifest": manifest(out)})


def manifest(out: Path) -> dict[str, str]:
    """SHA-256 of every result file by its path under `out`: records, checkpoints, summaries, reports."""
    files = sorted(path for path in out.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {
        str(path.relative_to(out)): hashlib.file_digest(path.open("rb"), "sha256").hexdigest()
        for path in files
        if path.suffix in (".json", ".jsonl", ".parquet", ".html", ".safetensors") and path.name != "suite.json"
    }


def changed(out: Path) -> list[str]:
    """Files whose bytes are not those of the manifest, or that are gone."""
    held, now = read_json(out / "suite.json")["manifest"], manifest(out)
    return sorted(path for path, digest in held.items() if now.get(path) != digest)


def _repair(suite: Suite, out: Path) -> list[str]:
    """Drop half-written last lines, before several workers read the files; RecordsError for a broken line elsewhere."""
    noted = []
    for path in [out / cell.name / name for cell in suite.cells(out) for name in RECORDS]:
        _, half = Records(path).keep(lambda record: True)
        if half:
            noted.append(f"{path.relative_to(out)} ended in a half-written record: dropped, it is computed again")
    return noted


def _deciding(suite: dict[str, Any]) -> dict[str, Any]:
    """What two runs of one folder must agree on; variants by name, so that a difference is said by its key."""
    variants = {entry["name"]: {k: v for k, v in entry.items() if k != "expect"} for entry in suite["variants"]}
    return {key: {**suite, "variants": variants}[key] for key in _DECIDES}


def _stamp(suite: Suite, out: Path, trains: bool) -> dict[str, Any]:
    """This run's stamp over `earlier` ones; a run that trains nothing leaves the one on top, which says what made it.

    Its own is then kept under `later`. SuiteError where training records of another machine are there.
    """
    new, path = provenance.stamp(seeds=tuple(range(suite.seeds))), out / "stamp.json"
    old = read_json(path) if path.exists() else {}
    trained = _recorded(out / cell.name / name for cell in suite.cells(out) for name in RECORDS)
    if trains and trained and label_of(new) != label_of(old):
        raise SuiteError(
            f"{out} holds training records {label_of(old)}, this machine's are {label_of(new)}: choose another --out"
        )
    if not old:
        return new
    earlier, later = old.pop("earlier", []), old.pop("later", [])
    if not trains and (trained or _recorded([out / "probe.jsonl"])):
        return {**old, "earlier": earlier, "later": [*later, new]}
    return {**new, "earlier": [*earlier, old, *later]}


def _recorded(paths: Iterable[Path]) -> bool:
    return any(records(path) for path in paths)
