"""`quads bench run`: measure what this machine can, model the rest, and leave a folder.

Output folder: `results.jsonl`, a line as soon as a case is done; `report.html` and `table.md` at the end. A case that
already has a line from the same sources on the same machine is not measured again: an interrupted run goes on.
Nothing is timed while it is wrong: each operation's checks run before its first case, each case's own before its turn.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from quads.bench import cases, identity, rollouts, warm
from quads.bench.cases import Group
from quads.bench.measure import Ceilings, checks, measure, one_line
from quads.bench.monitor import Monitor
from quads.bench.printed import printed
from quads.bench.results import Result, ResultsFile, result
from quads.compare.records import Record
from quads.kernels import support


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What to measure.

    budget: seconds, None for no limit; only: operations (empty: all); workers: processes that compile beforehand;
    rollout: a vllm.json of bench/h200_vllm.py that was measured before.
    """

    out: Path
    budget: float | None = None
    only: tuple[str, ...] = ()
    quick: bool = False
    device: str = "auto"
    workers: int = 8
    report: bool = True
    rollout: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """How many lines of each kind this run wrote."""

    results: int
    failed: int
    skipped: int
    absent: int


def run(config: RunConfig, console: Console | None = None) -> Outcome:
    """Measure, model, report. ValueError for an unknown operation, CannotRunHereError where a wanted GPU is missing."""
    console = console or Console(highlight=False)
    if config.rollout and not config.rollout.is_file():
        raise FileNotFoundError(f"--rollout {config.rollout} does not exist")
    groups = [g for device in cases.devices(config.device) for g in _chosen(config, device)]
    config.out.mkdir(parents=True, exist_ok=True)
    job = _Job(config, console)
    job.start(groups)
    with Monitor.here() as monitor, Progress(console=console, transient=True) as progress:
        task = progress.add_task("cases", total=len(groups))
        for group in groups:
            progress.update(task, description=group.title)
            job.measure(group, monitor)
            progress.advance(task)
    job.roll_out()
    job.skip_other_devices()
    job.model()
    job.report()
    return job.outcome()


def _chosen(config: RunConfig, device: str) -> list[Group]:
    return cases.chosen(cases.catalogue(device), config.only, config.quick)


class _Job:
    """State of one run."""

    def __init__(self, config: RunConfig, console: Console) -> None:
        self.config, self.console = config, console
        self.file = ResultsFile(config.out)
        self.started = time.monotonic()
        stamp = identity.stamp()
        self.stamp = stamp["stamp"]
        earlier = [r for r in self._earlier() if r.get("stamp") == self.stamp]
        self.done = {r["case"] for r in earlier if r.get("kind") in ("result", "failed")}
        self.ceilings = Ceilings()
        for record in earlier:
            if record.get("kind") == "result" and record["op"] == "ceiling":
                self.ceilings = self.ceilings.joined(result(record))
        self.passed: dict[str, str] = {}  # operation -> "" or why its checks failed
        self.absent: set[tuple[str, str]] = set()
        self.counts = {"result": 0, "failed": 0, "skipped": 0, "absent": 0}
        self.file.append({"kind": "stamp", **stamp})

    def _earlier(self) -> list[Record]:
        return self.file.records() if self.file.path.exists() else []

    def start(self, groups: Sequence[Group]) -> None:
        """Say what runs, and compile kernels in several processes, which a GPU's many short compilations need."""
        gpu = f"{support.device_name()}" if any(g.device == "cuda" for g in groups) else "CPU"
        self.console.print(f"{len(groups)} groups on {escape(gpu)}, {len(self.done)} cases already measured")
        todo = [g for g in groups if g.device == "cuda" and g.op in warm.COMPILED and not self._is_done(g)]
        if todo and self.config.workers:
            c = self.config
            seconds = warm.compile_all(
                c.out, self.stamp, c.workers, c.only, c.quick, self._left(), lambda: [self._is_done(g) for g in groups]
            )  # which imports the peers
            self.console.print(f"kernels compiled and checked by {c.workers} processes in {seconds:.0f} s")
            self.file.append({"kind": "group", "case": "compile", "seconds": round(seconds, 1), "stamp": self.stamp})

    def _left(self) -> float | None:
        return None if self.config.budget is None else self.config.budget - (time.monotonic() - self.started)

    def _is_done(self, group: Group) -> bool:
        return all(group.name(case) in self.done or case.missing() for case in group.cases)

    def measure(self, group: Group, monitor: Monitor) -> None:
        """One group, unless it is done, the budget is spent, or its operation's checks failed."""
        if self._is_done(group):
            self._name_absent(group)
            return
        left = self._left()
        if left is not None and left <= 0:
            self._write({"kind": "skipped", "case": group.title, "why": f"budget of {self.config.budget:.0f} s spent"})
        elif why := self._check(group):
            self._write({"kind": "failed", "case": group.title, "why": f"{why}; not timed"})
        else:
            started = time.monotonic()
            for line in measure(group, monitor, self.ceilings, self.stamp):
                self._write(line)
            took = round(time.monotonic() - started, 1)
            self.file.append({"kind": "group", "case": group.title, "seconds": took, "stamp": self.stamp})

    def _name_absent(self, group: Group) -> None:
        for case in group.cases:
            if why := case.missing():
                self._write({"kind": "absent", "peer": case.implementation, "op": group.op, "why": why})

    def _check(self, group: Group) -> str:
        """Why an operation is wrong, "" where its checks passed (or it has none)."""
        check = checks(group.device).get(group.op)
        if check is None:
            return ""
        if check.__name__ not in self.passed:
            lines = [r for r in self.file.records("check") if (r["name"], r["stamp"]) == (check.__name__, self.stamp)]
            if not lines and group.cases[0].missing():
                return ""  # nothing of ours runs here
            found = lines[-1] if lines else warm.outcome(check)
            self._write(found) if not lines else self._show(found)
            self.passed[check.__name__] = "" if found["passed"] else f"check '{check.__name__}' failed: {found['why']}"
        return self.passed[check.__name__]

    def _write(self, line: Result | Record) -> None:
        record = line.record() if isinstance(line, Result) else {"stamp": self.stamp, **line}
        kind = record["kind"]
        if kind == "absent":
            key = (record["peer"], record["why"])
            if key in self.absent:
                return
            self.absent.add(key)
        self.file.append(record)
        if kind == "stamp":
            return
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if isinstance(line, Result) and line.op == "ceiling":
            self.ceilings = self.ceilings.joined(line)
        self._show(record)

    def _show(self, record: Record) -> None:
        self.console.print(f"{time.monotonic() - self.started:5.0f} s {printed(record)}", soft_wrap=True)

    def roll_out(self) -> None:
        """Rollouts in vLLM: those that were measured before, or run now where vLLM and the budget allow."""
        wanted = not self.config.only or "rollout" in self.config.only
        if not wanted or any(r.op == "rollout" for r in self.file.results("measured")):
            return
        given, left = self.config.rollout, self._left()
        if given is None and (why := rollouts.missing(left)):
            self._write({"kind": "skipped", "case": "rollout", "why": why})
            return
        try:
            path = given or rollouts.run(self.config.out, left)
            for line in rollouts.lines(path):
                self._write(line)
        except Exception as error:
            self._write({"kind": "failed", "case": "rollout", "why": one_line(error)})

    def skip_other_devices(self) -> None:
        """Name the operations that only a GPU runs, where there is none."""
        reason = support.missing_gpu()
        if reason and self.config.device == "auto":
            names = dict.fromkeys(g.op for g in _chosen(self.config, "cuda"))
            for op in names:
                self._write({"kind": "skipped", "case": f"{op} on a GPU", "why": reason})

    def model(self) -> None:
        """What the roofline model says of chips that are not here, in the light of what was measured."""
        from quads.bench import model

        try:
            count = self.file.replace_modelled(model.predictions(self.config.out))
            self.console.print(f"{count} modelled results for other chips")
        except Exception as error:  # measured results stand without it
            self._write({"kind": "failed", "case": "model", "why": one_line(error)})

    def report(self) -> None:
        """Write report.html and table.md; without plotly that is left for `quads bench report`."""
        if not self.config.report or importlib.util.find_spec("quads.bench.report") is None:
            return
        try:
            importlib.import_module("quads.bench.report").write_report(self.config.out)
        except Exception as error:
            self._write({"kind": "skipped", "case": "report", "why": one_line(error)})

    def outcome(self) -> Outcome:
        """Counts, printed too."""
        c = self.counts
        seconds = time.monotonic() - self.started
        self.console.print(
            f"{c['result']} results, {c['failed']} failed, {c['skipped']} skipped, {c['absent']} peers absent"
            f" in {seconds:.0f} s: {self.file.path}"
        )
        return Outcome(c["result"], c["failed"], c["skipped"], c["absent"])
