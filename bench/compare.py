"""`quads bench compare BASE NEW`: what became slower beyond the noise, between two runs on machines of one class.

A case regressed where its time grew by more than FACTOR **and** the intervals of both medians do not overlap; it
improved where the same holds the other way round. A case that ran on a throttled or shared machine decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.text import Text

from quads.bench.results import FILE, Result, ResultsFile
from quads.errors import CannotRunHereError, GateFailedError

FACTOR = 1.05


@dataclass(frozen=True, kw_only=True)
class Change:
    """One case of both runs."""

    base: Result
    new: Result

    @property
    def case(self) -> str:
        """The key of both."""
        return self.new.case

    @property
    def factor(self) -> float:
        """New over base seconds."""
        return self.new.seconds / self.base.seconds

    @property
    def marked(self) -> str:
        """Why it decides nothing, "" where it does."""
        said = [f"{name} {one.conditions.marked}" for name, one in self._both() if one.conditions.marked]
        return ", ".join(said)

    def slower(self) -> bool:
        """Beyond the factor and beyond both intervals."""
        return self.factor > FACTOR and _low(self.new) > _high(self.base)

    def faster(self) -> bool:
        """The same the other way round."""
        return self.factor < 1 / FACTOR and _high(self.new) < _low(self.base)

    def _both(self) -> tuple[tuple[str, Result], ...]:
        return ("base", self.base), ("new", self.new)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs on one class of machine. gone, added: cases of only one of them."""

    machine: str
    changes: tuple[Change, ...]
    gone: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def regressions(self) -> list[Change]:
        """Cases that became slower beyond the noise, worst first."""
        return sorted((c for c in self.changes if c.slower() and not c.marked), key=lambda c: -c.factor)

    @property
    def improvements(self) -> list[Change]:
        """Cases that became faster beyond the noise, best first."""
        return sorted((c for c in self.changes if c.faster() and not c.marked), key=lambda c: c.factor)

    @property
    def undecided(self) -> list[Change]:
        """Cases that moved, but ran on a throttled or shared machine in one of the runs."""
        return [c for c in self.changes if c.marked and (c.slower() or c.faster())]

    def summary(self) -> str:
        """One line."""
        counts = (
            (len(self.regressions), "slower"), (len(self.improvements), "faster"), (len(self.undecided), "undecided"),
            (len(self.gone), "gone"), (len(self.added), "added"),
        )  # fmt: skip
        said = ", ".join(f"{count} {name}" for count, name in counts)
        return f"{len(self.changes)} cases on {self.machine}: {said}"

    def render(self) -> Group:
        """Lines for a terminal: what fell, what rose, what decides nothing, what is gone; then the summary."""
        titled = (
            ("Slower beyond the noise", self.regressions), ("Faster beyond the noise", self.improvements),
            ("Moved, but on a throttled or shared machine", self.undecided),
        )  # fmt: skip
        lines = []
        for title, changes in titled:
            lines += [Text(title, style="bold"), *map(_line, changes)] if changes else []
        return Group(*lines, *(Text(f"gone: {case}") for case in self.gone), Text(self.summary()))

    def check(self) -> None:
        """Raise GateFailedError, in one line, where something became slower beyond the noise."""
        if self.regressions:
            worst = ", ".join(f"{c.case} {c.factor:.2f}x" for c in self.regressions[:5])
            more = len(self.regressions) - 5
            raise GateFailedError(f"slower beyond the noise: {worst}" + (f" and {more} more" if more > 0 else ""))


def compare(base: Path, new: Path) -> Comparison:
    """Compare two runs, each a folder or its results.jsonl.

    ValueError (RecordsError) for a broken file, FileNotFoundError where there is none, CannotRunHereError where the
    machines differ in class or no case is in both.
    """
    files = [ResultsFile(path.parent if path.name == FILE else path) for path in (base, new)]
    before, after = ({one.case: one for one in file.results("measured")} for file in files)
    machines = [_machine(file) for file in files]
    if machines[0] != machines[1]:
        raise CannotRunHereError(f"no comparable baseline: {base} ran on {machines[0]}, {new} on {machines[1]}")
    shared = [case for case in after if case in before]
    if not shared:
        raise CannotRunHereError(f"no comparable baseline: {base} and {new} have no measured case in common")
    return Comparison(
        machine=machines[0],
        changes=tuple(Change(base=before[case], new=after[case]) for case in shared),
        gone=tuple(case for case in before if case not in after),
        added=tuple(case for case in after if case not in before),
    )


def _machine(file: ResultsFile) -> str:
    """Class of the machine: the GPU's name, else the processor's. ValueError where a run holds several."""
    stamps = file.stamps()
    names = {str((stamp.get("gpu") or {}).get("name") or stamp.get("cpu", "an unknown machine")) for stamp in stamps}
    if len(names) != 1:
        raise ValueError(f"{file.path}: results of {len(names)} machines ({', '.join(sorted(names)) or 'no stamp'})")
    return names.pop()


def _low(one: Result) -> float:
    return one.seconds if one.seconds_low is None else one.seconds_low


def _high(one: Result) -> float:
    return one.seconds if one.seconds_high is None else one.seconds_high


def _line(change: Change) -> Text:
    times = f"{_time(change.base)} -> {_time(change.new)} us"
    said = f" ({change.marked})" if change.marked else ""
    return Text(f"  {change.factor:5.2f}x  {change.case}  {times}{said}")


def _time(one: Result) -> str:
    return f"{1e6 * one.seconds:,.1f} [{1e6 * _low(one):,.1f} {1e6 * _high(one):,.1f}]"
