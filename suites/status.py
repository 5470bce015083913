"""What a running suite shows: bars with time left on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from quads.suites.jobs import Job
from quads.suites.worker import Message

_LINE_EVERY = 20.0  # seconds between two lines where there is no terminal


class Status:
    """Counts arm-steps of all jobs and says how many are left."""

    def __init__(self, title: str, jobs: Sequence[Job], console: Console, deadline: float) -> None:
        self.title, self.console, self.deadline = title, console, deadline
        self.total = sum(job.steps for job in jobs)
        self.at: dict[str, int] = {}
        self.first: dict[str, int] = {}  # where a resumed job came from, which is no work of this run
        self.running = 0
        self._started = self._said = time.monotonic()
        self._bars: Progress | None = None
        self._whole: Any = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it while the context is open."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(
            *columns, TimeElapsedColumn(), console=self.console, disable=not self.console.is_terminal
        ) as bars:
            self._bars, self._whole = bars, bars.add_task(self.title, total=self.total)
            yield

    def hear(self, job: Any, message: Message) -> None:
        """Take what a worker said about `job`."""
        if message.kind == "say":
            self.console.print(message.text)
        if message.kind in ("step", "done"):
            self.first.setdefault(job.label, message.step)
            self.at[job.label] = message.step

    def tick(self, running: int) -> None:
        """Show how far all jobs are, with `running` of them under way."""
        self.running = running
        if self._bars is not None and not self._bars.disable:
            self._bars.update(self._whole, completed=self.done, description=self.line())
        elif time.monotonic() - self._said >= _LINE_EVERY:
            self._said = time.monotonic()
            self.console.print(self.line())

    @property
    def done(self) -> int:
        return sum(self.at.values())

    @property
    def seconds_a_step(self) -> float:
        """Seconds of wall clock for an arm-step of this run, all workers together; 0 before the first."""
        steps = self.done - sum(self.first.values())
        return (time.monotonic() - self._started) / steps if steps > 0 else 0.0

    def line(self) -> str:
        text = f"{self.title}: {self.done}/{self.total} arm-steps, {self.running} running"
        if not self.seconds_a_step:
            return text
        left = (self.total - self.done) * self.seconds_a_step
        text += f", {self.seconds_a_step:.3f} s an arm-step, {_clock(left)} of work left"
        budget = self.deadline - time.time()
        return text if budget == float("inf") else f"{text}, {_clock(max(0.0, budget))} of budget"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
