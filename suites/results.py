"""A suite's result folder as it stands, finished or not: the suite, its stamp, runs by cell, probe records by place."""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quads import recipes
from quads.compare.records import Record, Records, RecordsError, parse
from quads.recipes import Recipe, RecipeError
from quads.suites.config import CONTROLS, Hypothesis, Probe, Suite, Variant

FURTHEST = 0.5  # a run that has not reached this share of what others reached is left out of a comparison


@dataclass(frozen=True)
class Run:
    """One arm and seed of a cell: records of training steps and of evaluations, in order, a step once.

    failure: the record of a run that ended because something stopped being finite. It is not left out, for that would
    hide the worst: it counts as collapsed, and from there on as solving nothing.
    """

    arm: str
    seed: int
    steps: tuple[Record, ...] = ()
    evals: tuple[Record, ...] = ()
    failure: Record | None = None

    def until(self, step: int) -> Run:
        """The run as it was at `step`."""
        evals = tuple(record for record in self.evals if record["step"] <= step)
        if self.failure is None or self.failure["step"] > step:
            failure = None
        else:
            failure, evals = self.failure, (*evals, _nothing_solved(evals[0], step)) if evals else ()
        steps = tuple(record for record in self.steps if record["step"] <= step)
        return dataclasses.replace(self, steps=steps, evals=evals, failure=failure)

    def trained(self) -> frozenset[int]:
        """Steps that have a training record."""
        return frozenset(record["step"] for record in self.steps)

    def evaluated(self) -> frozenset[int]:
        """Steps, 0 among them, that have an evaluation."""
        return frozenset(record["step"] for record in self.evals)


Arms = dict[str, dict[int, Run]]  # recipe name -> seed -> run


@dataclass(frozen=True)
class Meeting:
    """The steps that all runs of `seeds` have, and the seeds that were too far behind to wait for."""

    steps: tuple[int, ...]
    seeds: tuple[int, ...]
    behind: tuple[int, ...]

    @property
    def step(self) -> int:
        """The last of them."""
        return self.steps[-1]


@dataclass(frozen=True)
class Results:
    """Everything in one folder. probe: place ("POLICY[/OUTLIERS]/REFERENCE") -> arm -> draw -> record."""

    suite: Suite
    identity: str
    stamp: dict[str, Any]
    cells: dict[str, Arms]
    probe: dict[str, dict[str, dict[int, Record]]] = field(default_factory=dict)
    layers: tuple[Record, ...] = ()
    noted: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing was trained, evaluated or probed yet."""
        return not (any(self.cells.values()) or self.probe or self.layers)

    @property
    def label(self) -> str:
        """What the numbers are, by the machine that trained: measured on a GPU, or emulated on a CPU."""
        return label_of(self.stamp)


def label_of(stamp: dict[str, Any]) -> str:
    """What a run with this stamp gives."""
    gpu = stamp.get("gpu")
    return f"measured ({gpu['name']})" if gpu else "emulated (CPU)"


def load(out: Path) -> Results:
    """Read the folder of a suite. FileNotFoundError without a suite.json, RecordsError for a broken record."""
    document = read_json(out / "suite.json")
    suite = suite_from_dict(document.get("suite", document))
    stamp = read_json(out / "stamp.json") if (out / "stamp.json").exists() else {}
    noted: list[str] = []
    cells = {cell.name: _cell(out / cell.name, noted) for cell in suite.cells(out)}
    records = _records(out / "probe.jsonl", noted)
    layers = tuple(record for record in records if record.get("kind") == "layer")
    identity = document.get("identity", suite.identity)
    return Results(suite, identity, stamp, cells, _by_place(records), layers, tuple(noted))


def suite_from_dict(document: dict[str, Any]) -> Suite:
    """The suite that `Suite.to_dict` wrote."""
    parts = _tuples(document)
    parts["variants"] = tuple(Variant(**entry) for entry in document["variants"])
    parts["hypotheses"] = tuple(Hypothesis(**entry) for entry in document["hypotheses"])
    parts["probe"] = Probe(**_tuples(document["probe"])) if document.get("probe") else None
    return Suite(**parts)


def _tuples(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}


def meet(arms: Iterable[dict[int, Run]], has: Callable[[Run], frozenset[int]]) -> Meeting | None:
    """Where runs of several arms can be compared: seeds that all arms have, at the last step that all of them have.

    A seed of which an arm has not reached `FURTHEST` of the furthest seed's step is left behind rather than waited
    for. None where there is no such step.
    """
    runs = list(arms)
    seeds = sorted(set.intersection(*(set(arm) for arm in runs))) if runs else []
    every = frozenset[int]().union(*(has(run) for arm in runs for run in arm.values()))
    shared = {seed: frozenset.intersection(*(_counted(arm[seed], has, every) for arm in runs)) for seed in seeds}
    furthest = max((max(steps) for steps in shared.values() if steps), default=None)
    if furthest is None:
        return None
    kept = [seed for seed in seeds if shared[seed] and max(shared[seed]) >= FURTHEST * furthest]
    common = frozenset.intersection(*(shared[seed] for seed in kept))
    behind = sorted({seed for arm in runs for seed in arm} - set(kept))
    return Meeting(tuple(sorted(common)), tuple(kept), tuple(behind)) if common else None


def _counted(run: Run, has: Callable[[Run], frozenset[int]], every: frozenset[int]) -> frozenset[int]:
    """Steps of the run; all steps from its failure on, which nobody need wait for."""
    late = frozenset(step for step in every if run.failure and step >= run.failure["step"])
    return has(run) | late


def _nothing_solved(like: Record, step: int) -> Record:
    record: Record = {**like, "step": step, "eval/accuracy": 0.0, "eval/trainer_accuracy": 0.0}
    digits = [key for key in ("eval/correct", "eval/trainer_correct") if key in like]
    return record | {key: "0" * len(like[key]) for key in digits}


def name_of(arm: str) -> str:
    """The name that an arm's records carry: a recipe file's stem, else the arm as written."""
    return arm if arm in CONTROLS else recipes.load(arm).name


def recipe_of(name: str) -> Recipe | None:
    """The recipe that the arm of a record names; None for a control, and for a recipe file's stem."""
    try:
        return None if name in CONTROLS else recipes.load(name)
    except RecipeError:
        return None


def places(policy: str, outliers: str, reference: str) -> str:
    """The place of a probe record: POLICY[/OUTLIERS]/REFERENCE."""
    return "/".join(part for part in (policy, outliers, reference) if part)


def _cell(folder: Path, noted: list[str]) -> Arms:
    tables: dict[str, dict[tuple[str, int], dict[int, Record]]] = {}
    for name in ("runs", "evals", "failures"):
        tables[name] = defaultdict(dict)
        for record in _records(folder / f"{name}.jsonl", noted):
            tables[name][record["arm"], record["seed"]][record["step"]] = record
    arms: Arms = defaultdict(dict)
    for arm, seed in sorted(tables["runs"].keys() | tables["evals"].keys()):
        steps, evals, failures = (
            tuple(of[arm, seed][step] for step in sorted(of[arm, seed])) for of in tables.values()
        )
        arms[arm][seed] = Run(arm, seed, steps, evals, failures[0] if failures else None)
    return dict(arms)


def _by_place(records: list[Record]) -> dict[str, dict[str, dict[int, Record]]]:
    found: dict[str, dict[str, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        if record.get("kind", "probe") == "probe":
            place = places(record["policy"], record["outliers"], record["reference"])
            found[place][record["arm"]][record["draw"]] = record
    return {place: dict(arms) for place, arms in found.items()}


def _records(path: Path, noted: list[str]) -> list[Record]:
    """Whole records of a file that may not be there; a half-written last line is left out and noted."""
    if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        noted.append(f"{path.parent.name}/{path.name} ends in a half-written record: left out")
    return records(path)


def records(path: Path) -> list[Record]:
    """Records of a JSONL file, or of PATH.gz, as published folders keep it; none where neither is."""
    packed = path.with_name(f"{path.name}.gz")
    if path.exists() or not packed.exists():
        return Records(path).read()
    try:
        return parse(packed, gzip.decompress(packed.read_bytes()))
    except (OSError, EOFError, zlib.error) as error:
        raise RecordsError(f"{packed} is no whole gzip file: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; FileNotFoundError, or RecordsError that names the file."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: name the folder of a suite that was run") from None
    except (OSError, ValueError) as error:
        raise RecordsError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise RecordsError(f"{path} is not a JSON object")
    return document
