"""Run a suite: its jobs side by side, then its probe, summary and report; resumable after anything.

    outcome = run(config.load("ci"), Path("runs/ci"), budget=540)

Everything is recorded as it happens (quads.compare.records), so an interrupted, killed or out-of-time run goes on from
its checkpoints when it is called again; on a CPU its records then equal an uninterrupted run's byte for byte, on a GPU
within what the kernels' and atomics' order leaves open.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

from rich.console import Console

from quads.compare.config import CompareConfig, CompareError
from quads.suites import folder, jobs, pool, worker
from quads.suites.config import Suite, SuiteError
from quads.suites.jobs import Job
from quads.suites.status import Status

_AFTERWARDS = 0.1  # share of a budget kept for the probe where jobs would use it all


@dataclass(frozen=True)
class Options:
    """How to run, none of which changes a record. budget: seconds, inf for no limit; workers 0: as many as fit.

    arms, seeds: only these of the suite's, all if empty. probe: seconds that the probe may take, 0 to leave it out.
    """

    budget: float = math.inf
    workers: int = 0
    arms: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    report_to: str = ""
    probe: float = math.inf


@dataclass
class Outcome:
    """Jobs that are finished and wanted, those that failed with a line each, and the speed of this run."""

    finished: int = 0
    wanted: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    seconds_a_step: float = 0.0
    summary: dict[str, Any] = field(default_factory=dict)


def run(suite: Suite, out: Path, options: Options | None = None, console: Console | None = None) -> Outcome:
    """Run or resume `suite` in `out`; returns what is finished. Bad input is a ValueError before anything is written.

    KeyboardInterrupt lets steps finish and leaves a folder to resume; CannotRunHereError on a full disk.
    """
    options, console = options or Options(), console or Console(stderr=True)
    deadline = time.time() + options.budget
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # many small processes: the fork server's children inherit it
    wanted = jobs.jobs(suite, out, options.arms, options.seeds, options.report_to)
    _check(wanted)
    left = [job for job in wanted if not job.finished()]
    for line in folder.claim(suite, out, trains=bool(left)):
        console.print(line)
    outcome = Outcome(len(wanted) - len(left), len(wanted))
    try:
        if left:
            _train(suite, left, outcome, options, console, deadline)
    except BaseException:
        folder.seal(suite, out)
        console.print(f"stopped; finished steps are in {out}: the same command goes on from there")
        raise
    _probe(suite, out, min(options.probe, deadline - time.time()), console)
    outcome.summary = finish(suite, out, console)
    _say_end(outcome, out, console)
    return outcome


def finish(suite: Suite, out: Path, console: Console) -> dict[str, Any]:
    """Summary, parquet, report and hashes of what `out` holds."""
    from quads.suites import summary

    written = summary.write(out)
    if util.find_spec("pyarrow") is not None:
        from quads.suites import export

        export.write(out)
    if util.find_spec("plotly") is None:
        console.print("no report: python -m pip install 'quads[report]'")
    else:
        from quads.suites import report

        console.print(f"report: {report.write(out)}")
    folder.seal(suite, out)
    return written


def _train(
    suite: Suite, left: list[Job], outcome: Outcome, options: Options, console: Console, deadline: float
) -> None:
    """Run the jobs that are left, and say in `outcome` how they ended."""
    workers = min(options.workers or pool.default_workers(), len(left))
    until = (
        deadline - _AFTERWARDS * options.budget if suite.probe and options.probe and deadline < math.inf else deadline
    )
    _prepare(left, console, until)
    status = Status(suite.name, left, console, until)
    console.print(f"{suite.name}: {len(left)} runs to do ({outcome.finished} finished), {workers} side by side")
    with status.shown():
        ended = pool.Pool(workers, on_message=status.hear, on_tick=status.tick).work(left, until)
    outcome.finished += len(ended.done)
    outcome.failed, outcome.seconds_a_step = ended.failed, status.seconds_a_step
    console.print(status.line())


@dataclass(frozen=True)
class _Start:
    """The making of a start policy, as a job."""

    compare: CompareConfig
    steps: int = 0

    @property
    def label(self) -> str:
        return f"start {self.compare.start} of {self.compare.task}"


def _prepare(left: Sequence[Job], console: Console, deadline: float) -> None:
    """Make every start policy that is not there yet, one process each, before many workers ask for it."""
    from quads.compare import start

    missing: dict[str, _Start] = {}
    for job in left:
        config = job.compare
        if config.character and start.find(start.named(config.start, config.task)) is None:
            missing.setdefault(_Start(config).label, _Start(config))
    if not missing:
        return
    console.print(f"making {', '.join(missing)} (once; kept in {start.cache_folder()})")
    ended = pool.Pool(len(missing), run=worker.prepare, on_message=_said(console)).work(
        list(missing.values()), math.inf
    )
    for label, why in ended.failed.items():
        raise CompareError(f"{label} could not be made: {why}")


def _said(console: Console) -> Callable[[Any, worker.Message], None]:
    def hear(job: Any, message: worker.Message) -> None:
        if message.kind == "say":
            console.print(message.text)

    return hear


def _probe(suite: Suite, out: Path, budget: float, console: Console) -> None:
    if suite.probe is None or budget <= 0:
        return
    from quads.suites import probe

    try:
        outcome = probe.run(suite, out, budget=budget)
    except SuiteError as error:  # a policy that no run has trained yet: the next call finds it
        console.print(f"probe: {error}")
        return
    console.print(f"probe: {outcome.done} of {outcome.total} records")
    for line in outcome.failed:
        console.print(f"probe: {line}")


def _check(wanted: Sequence[Job]) -> None:
    """What would fail every run, before anything is written."""
    from quads import models
    from quads.compare import engines, job

    job.check_packages((*job.TRAINING, wanted[0].compare.report_to) if wanted else ())
    for config in {one.cell: one.compare for one in wanted}.values():
        engines.prepare(config.engine)
        if config.model:
            models.check_folder(Path(config.model))


def _say_end(outcome: Outcome, out: Path, console: Console) -> None:
    for label, why in outcome.failed.items():
        console.print(f"failed: {label}: {why}")
    left = outcome.wanted - outcome.finished
    if left:
        console.print(f"{left} of {outcome.wanted} runs are unfinished: the same command goes on from where they stand")
    else:
        console.print(f"all {outcome.wanted} runs are finished: {out}")
