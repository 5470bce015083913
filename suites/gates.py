"""The regression gate: what fell beyond its interval between a committed summary.json and a new one.

A number fell when it is worse than the baseline's by more than a written margin *and* the two 95 % intervals do not
meet. Besides numbers: BF16 no longer learns, a claim that was supported is refuted, an arm that held collapses in more
than half of its seeds. Summaries of other suites, settings, hardware or of unfinished runs are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quads.compare.config import differences
from quads.compare.records import RecordsError
from quads.errors import CannotRunHereError, GateFailedError
from quads.suites.results import read_json
from quads.suites.summary import FILE, SCHEMA

Numbers = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Margin:
    """How much worse a number may be whatever the intervals say: `absolute` plus `relative` times the baseline's."""

    better: str
    absolute: float = 0.0
    relative: float = 0.0


OUTCOMES = {
    "accuracy": Margin(better="higher", absolute=0.01),
    "trainer_accuracy": Margin(better="higher", absolute=0.01),
    "reward_last": Margin(better="higher", absolute=0.01),
    "gap_mean": Margin(better="lower", absolute=1e-5, relative=0.1),
    "gap_p99": Margin(better="lower", absolute=1e-4, relative=0.2),
}
PROBE = {
    "gap_mean": Margin(better="lower", absolute=1e-5, relative=0.1),
    "kl": Margin(better="lower", absolute=1e-6, relative=0.2),
}


@dataclass(frozen=True)
class Checked:
    """One number of the baseline beside the new one."""

    metric: str
    arm: str
    where: str
    old: Numbers
    new: Numbers
    fell: bool

    def __str__(self) -> str:
        return f"{self.metric} of {self.arm} in {self.where}: {_text(self.old)} -> {_text(self.new)}"


def check(baseline: Path, new: Path) -> list[Checked]:
    """Compare two summaries (files, or folders that hold one); returns every number that was held.

    GateFailedError names all that fell; CannotRunHereError says why the two cannot be compared; a malformed summary is
    a RecordsError (a ValueError) that names the file.
    """
    before, after = _load(baseline), _load(new)
    _check_comparable(before, after)
    try:
        checked = [*_outcomes(before, after), *_probe(before, after)]
        fell = [str(entry) for entry in checked if entry.fell] + list(_events(before, after))
    except (KeyError, TypeError) as error:
        raise RecordsError(f"{baseline} and {new} are not summaries of one form: {error!r}") from None
    if fell:
        raise GateFailedError(f"{len(fell)} beyond the baseline's interval: " + "; ".join(fell))
    return checked


def _load(path: Path) -> Numbers:
    path = path / FILE if path.is_dir() else path
    document = read_json(path)
    if document.get("schema") != SCHEMA:
        raise RecordsError(f"{path} has schema {document.get('schema')!r}, not {SCHEMA}: write it again")
    for key in ("suite", "identity", "label", "settings", "learned", "outcomes", "probe", "hypotheses"):
        if key not in document:
            raise RecordsError(f"{path} has no '{key}': it is not the summary of a suite")
    return document


def _check_comparable(before: Numbers, after: Numbers) -> None:
    same = ("suite", "identity", "label")
    changed = [f"{key} {before[key]} -> {after[key]}" for key in same if before[key] != after[key]]
    if changed:
        changed += differences(before["settings"], after["settings"], "settings.")
        raise CannotRunHereError(f"no comparable baseline: {'; '.join(changed)}")
    reached = {(entry["cell"], entry["arm"]): entry["steps"] for entry in after["outcomes"]}
    for entry in before["outcomes"]:
        steps = reached.get((entry["cell"], entry["arm"]), 0)
        if steps < entry["steps"]:
            where = f"{entry['arm']} in {entry['cell']}"
            raise CannotRunHereError(f"the new run is unfinished: {where} is at step {steps} of {entry['steps']}")


def _outcomes(before: Numbers, after: Numbers) -> Iterator[Checked]:
    new = {(entry["cell"], entry["arm"]): entry for entry in after["outcomes"]}
    for entry in before["outcomes"]:
        other = new[entry["cell"], entry["arm"]]
        for name, margin in OUTCOMES.items():
            yield _checked(name, margin, entry["arm"], entry["cell"], entry[name], other[name])


def _probe(before: Numbers, after: Numbers) -> Iterator[Checked]:
    new = {_place(entry): entry for entry in after["probe"]}
    for entry in before["probe"]:
        if _place(entry) not in new:
            raise CannotRunHereError(f"the new run is unfinished: the probe lacks {' '.join(_place(entry))}")
        where = "/".join(part for part in (entry["policy"], entry["outliers"], entry["reference"]) if part)
        for name, margin in PROBE.items():
            yield _checked(f"probe/{name}", margin, entry["arm"], where, entry[name], new[_place(entry)][name])


def _place(entry: Numbers) -> tuple[str, ...]:
    return tuple(entry[key] for key in ("policy", "outliers", "reference", "arm"))


def _checked(name: str, margin: Margin, arm: str, where: str, old: Numbers, new: Numbers) -> Checked:
    return Checked(name, arm, where, old, new, fell(old, new, margin))


def fell(old: Numbers, new: Numbers, margin: Margin) -> bool:
    """Whether `new` is worse than `old` beyond the margin and both intervals; a number that went missing fell."""
    if old["value"] is None:
        return False
    if new["value"] is None:
        return True
    sign = 1 if margin.better == "higher" else -1
    allowed = margin.absolute + margin.relative * abs(old["value"])
    if sign * (old["value"] - new["value"]) <= allowed:
        return False
    worst_old, best_new = ("low", "high") if sign > 0 else ("high", "low")
    return sign * (_end(old, worst_old) - _end(new, best_new)) > 0


def _end(numbers: Numbers, end: str) -> float:
    return float(numbers["value"] if numbers[end] is None else numbers[end])


def _events(before: Numbers, after: Numbers) -> Iterator[str]:
    learned = {entry["cell"]: entry["learned"] for entry in after["learned"]}
    for entry in before["learned"]:
        if entry["learned"] and not learned.get(entry["cell"]):
            yield f"bf16 no longer learns in {entry['cell']}"
    new = {(entry["cell"], entry["arm"]): entry for entry in after["outcomes"]}
    for entry in before["outcomes"]:
        other = new[entry["cell"], entry["arm"]]
        if not entry["collapsed"] and 2 * len(other["collapsed"]) > len(other["seeds"]):
            yield f"{entry['arm']} collapses in {len(other['collapsed'])} of {len(other['seeds'])} in {entry['cell']}"
    verdicts = {entry["id"]: entry["verdict"] for entry in after["hypotheses"]}
    for entry in before["hypotheses"]:
        if (entry["verdict"], verdicts.get(entry["id"])) == ("supported", "refuted"):
            yield f"hypothesis {entry['id']} was supported and is refuted"


def _text(numbers: Numbers) -> str:
    if numbers["value"] is None:
        return "missing"
    if numbers["low"] is None:
        return f"{numbers['value']:.4g}"
    return f"{numbers['value']:.4g} [{numbers['low']:.4g}, {numbers['high']:.4g}]"
