"""How far the model is off on the one chip where it can be checked: measured over predicted times of the H200's cases.

The measurements are anchors.json, times on an H200, each with its source:

    python -m quads.bench.model_error docs/results/bench-h200      # take the operations of a new run as anchors

An error belongs to an operation, numerics, implementation and variant; where the H200 has no such case, it is that of
fewer of these in turn, and its source says so.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from quads.bench import rollout_model
from quads.bench.operations import works
from quads.bench.results import ModelError, Result, ResultsFile, result
from quads.bench.specs import REFERENCE, chip, of_device
from quads.bench.work import seconds
from quads.compare.records import Record, write_atomically

FILE = "anchors.json"
_KEPT = ("op", "numerics", "variant", "implementation", "shape", "seconds", "in_a_row_seconds")
Key = tuple[str, ...]  # operation, numerics, implementation, variant


class Errors:
    """Errors of some measured results; `others` answers for cases that are not among them."""

    def __init__(self, measured: Iterable[Result], source: str, others: Errors | None = None) -> None:
        self._source, self._others = source, others
        self._ratios: dict[Key, list[float]] = defaultdict(list)
        for one in measured:
            found = ratio(one)
            if found is not None:
                self._ratios[one.op, one.numerics, one.implementation, one.variant].append(found)

    def of(self, *key: str) -> ModelError | None:
        """The error of an operation, numerics, implementation and variant; None where nothing like it was measured."""
        found = (self._alike(key, length) for length in range(len(key), 0, -1))
        return next((error for error in found if error), None)

    def _alike(self, key: Key, length: int) -> ModelError | None:
        """The error of all cases that agree with the first `length` parts of `key`."""
        ratios = [r for own, found in self._ratios.items() if own[:length] == key[:length] for r in found]
        if not ratios:
            return self._others._alike(key, length) if self._others else None
        missing = f"; of all of {' '.join(key[:length])}, the case itself not being among them"
        return ModelError(
            ratio=statistics.median(ratios), low=min(ratios), high=max(ratios), cases=len(ratios),
            source=self._source + (missing if length < len(key) else ""),
        )  # fmt: skip


def ratio(measured: Result) -> float | None:
    """Measured over predicted seconds on the H200, in a row where that was measured; None where not modelled."""
    reference = chip(REFERENCE)
    if measured.op == "rollout":
        predicted = rollout_model.predicted(measured, reference)
        return measured.seconds / predicted if predicted else None
    found = works(measured.op, measured.numerics, measured.implementation, measured.variant, measured.shape, reference)
    if found is None:
        return None
    if measured.in_a_row_seconds:
        return measured.in_a_row_seconds / seconds(found, reference)
    return measured.seconds / seconds(found, reference, isolated=True)


@dataclass(frozen=True)
class Anchors:
    """Measurements from one place."""

    source: str
    results: tuple[Result, ...]


@cache
def stored() -> tuple[Anchors, ...]:
    """The measurements of anchors.json by their sources."""
    document = json.loads(resources.files("quads.bench").joinpath(FILE).read_text("utf-8"))
    return tuple(Anchors(part["source"], tuple(map(result, part["results"]))) for part in document["anchors"])


def anchors() -> tuple[str, tuple[Result, ...]]:
    """Where the measurements come from, and the measurements."""
    return "; ".join(part.source for part in stored()), tuple(one for part in stored() for one in part.results)


@cache
def known() -> Errors:
    """Errors of the stored measurements."""
    found = Errors((), "")
    for part in stored():
        found = Errors(part.results, part.source, found)
    return found


def checks_of(file: ResultsFile) -> tuple[str, tuple[Result, ...]]:
    """What the model is checked against: a run's own results where it ran on an H200, else the stored ones."""
    own = _of_run(file)
    return (own.source, own.results) if own else anchors()


def of_folder(folder: Path) -> Errors:
    """Errors of a run on an H200, the stored ones for cases that it did not measure."""
    own = _of_run(ResultsFile(folder))
    return Errors(own.results, own.source, known()) if own else known()


def _of_run(file: ResultsFile) -> Anchors | None:
    """What a run measured on an H200; None where it did not."""
    if not any((found := of_device(gpu_name(stamp))) and found.key == REFERENCE for stamp in file.stamps()):
        return None
    own = tuple(one for one in file.results("measured") if ratio(one) is not None)
    return Anchors(f"this run, {REFERENCE}", own) if own else None


def gpu_name(stamp: Record) -> str:
    """The GPU of a stamp, "" without one."""
    return str((stamp.get("gpu") or {}).get("name", ""))


def write(folder: Path) -> int:
    """Take the measured results of `folder` that the model covers as anchors; returns how many.

    Operations that it did not measure keep the anchors that they have.
    """
    file = ResultsFile(folder)
    stamp = file.stamps()[-1]
    kept = tuple(one for one in file.results("measured") if ratio(one) is not None)
    if not kept:
        raise ValueError(f"{folder}: holds no measured result that the model covers")
    git = stamp.get("git") or {"sha": "unknown"}
    source = f"{folder.name}, {gpu_name(stamp)}, {git['sha'][:7]}{' with changes' if git.get('dirty') else ''}"
    measured = {one.op for one in kept}
    others = (Anchors(a.source, tuple(one for one in a.results if one.op not in measured)) for a in stored())
    save((Anchors(source, kept), *(part for part in others if part.results)))
    return len(kept)


def save(parts: Iterable[Anchors]) -> None:
    """Rewrite anchors.json, a line a measurement."""

    def rows(part: Anchors) -> str:
        return ",\n".join(json.dumps({key: one.record()[key] for key in _KEPT}) for one in part.results)

    text = ",\n".join(f'{{"source": {json.dumps(part.source)}, "results": [\n{rows(part)}\n]}}' for part in parts)
    write_atomically(Path(__file__).with_name(FILE), f'{{"anchors": [\n{text}\n]}}\n'.encode())


if __name__ == "__main__":
    print(f"{write(Path(sys.argv[1]))} anchors")
