"""`quads suite report --compare OLD NEW`: what moved between two results of a suite, metric by metric.

Two intervals that do not overlap are flagged as moved. That is a strict test (two 95 % intervals may overlap although
their difference is certain) and an unpaired one; `quads suite check` holds the paired, written-down gates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from quads.compare.records import write_atomically
from quads.suites.report import read_summary, render
from quads.suites.report_numbers import DASH, interval, known, number
from quads.suites.report_words import words

Numbers = dict[str, Any]
Point = tuple[str, str, str]  # place, arm, metric

_OUTCOMES = ("accuracy", "trainer_accuracy", "reward_last", "gap_mean", "gap_p99", "gap_max", "k3", "ess")
_SPEEDS = ("rollout_tokens_per_s", "step_tokens_per_s", "memory_gib")
_PROBES = ("gap_mean", "gap_p99", "gap_max", "kl", "router_flips")
_METRIC = {
    **{("run", name): f"run/{name}" for name in ("gap_mean", "gap_p99")},
    **{("probe", name): f"probe/{name}" for name in ("gap_mean", "gap_p99", "kl", "router_flips")},
    **{("run", name): f"outcome/{name}" for name in ("accuracy", "trainer_accuracy", "reward_last")},
    ("run", "rollout_tokens_per_s"): "throughput/rollout_tokens_per_s",
}


@dataclass(frozen=True)
class Move:
    """One metric in both results; `moved` is None where an interval is missing on either side."""

    place: str
    arm: str
    metric: str
    old: Numbers
    new: Numbers

    @property
    def moved(self) -> bool | None:
        """Whether the intervals lie apart."""
        ends = [side.get(end) for side in (self.old, self.new) for end in ("low", "high")]
        if not all(known(end) for end in ends):
            return None
        return bool(self.new["low"] > self.old["high"] or self.new["high"] < self.old["low"])

    @property
    def change(self) -> str:
        """`up` or `down` and by how much; relative to the old value where that is not a share."""
        return number(float(self.new["value"] - self.old["value"]), signed=True)


@dataclass(frozen=True)
class Comparison:
    """Everything that two summaries share, and what only one of them has."""

    old: Path
    new: Path
    notes: list[str]
    verdicts: list[tuple[str, str, str, str]]  # id, claim, verdict then, verdict now
    moves: list[Move]

    @property
    def moved(self) -> list[Move]:
        """The metrics whose intervals lie apart."""
        return [move for move in self.moves if move.moved]

    def headline(self) -> str:
        """One sentence: how much moved."""
        changed = sum(before != after for *_, before, after in self.verdicts)
        judged = sum(move.moved is not None for move in self.moves)
        return (
            f"{len(self.moved)} of {judged} metrics with intervals moved (intervals apart); "
            f"{changed} of {len(self.verdicts)} verdicts changed"
        )

    def render(self) -> Group:
        """For the terminal: notes, changed verdicts, and the metrics that moved."""
        parts: list[Any] = [Text(f"note: {note}") for note in self.notes]
        changed = [(name, before, after) for name, _, before, after in self.verdicts if before != after]
        if changed:
            parts.append(_terminal("Verdicts that changed", ("hypothesis", "old", "new"), changed))
        if self.moved:
            rows = [(m.place, m.arm, m.metric, interval(m.old), interval(m.new), m.change) for m in self.moved]
            parts.append(_terminal("Metrics that moved", ("where", "arm", "metric", "old", "new", "change"), rows))
        return Group(*parts)

    def html(self) -> str:
        """A page: changed verdicts first, then every metric, moved ones on top."""
        order = {True: 0, None: 2, False: 1}
        return render(
            "report_compare.html",
            "quads suite: what moved",
            comparison=self,
            moves=sorted(self.moves, key=lambda move: order[move.moved]),
            metrics=words()["metrics"],
        )

    def write(self, path: Path | None = None) -> Path:
        """Write the page, beside the new result unless told otherwise; returns its path."""
        folder = self.new if self.new.is_dir() else self.new.parent
        path = path or folder / "compare.html"
        write_atomically(path, self.html().encode())
        return path


def compare(old: Path, new: Path) -> Comparison:
    """Compare two result folders (or summary.json files); ReportError for one that cannot be read."""
    before, after = read_summary(old), read_summary(new)
    was, now = dict(_points(before)), dict(_points(after))
    moves = [Move(*point, was[point], now[point]) for point in now if point in was]
    return Comparison(old, new, list(_notes(before, after, was, now)), _verdicts(before, after), moves)


def _points(summary: Numbers) -> Iterator[tuple[Point, Numbers]]:
    """Every metric of a summary that has a value, as {value, low, high}."""
    for row in summary["outcomes"]:
        for name in (*_OUTCOMES, *_SPEEDS):
            yield from _point((row["cell"], row["arm"], _METRIC.get(("run", name), f"run/{name}")), row.get(name))
    for row in summary["probe"]:
        place = "/".join(part for part in (row["policy"], row["outliers"], row["reference"]) if part)
        for name in _PROBES:
            yield from _point((place, row["arm"], _METRIC.get(("probe", name), f"probe/{name}")), row.get(name))


def _point(key: Point, value: Any) -> Iterator[tuple[Point, Numbers]]:
    numbers = value if isinstance(value, dict) else {"value": value, "low": None, "high": None}
    if known(numbers.get("value")):
        yield key, numbers


def _verdicts(before: Numbers, after: Numbers) -> list[tuple[str, str, str, str]]:
    was = {entry["id"]: entry["verdict"] for entry in before["hypotheses"]}
    return [
        (entry["id"], entry["claim"], was.get(entry["id"], "not stated"), entry["verdict"])
        for entry in after["hypotheses"]
    ]


def _notes(before: Numbers, after: Numbers, was: dict[Point, Numbers], now: dict[Point, Numbers]) -> Iterator[str]:
    for key, what in {"suite": "another suite", "identity": "other settings", "label": "another machine"}.items():
        if before[key] != after[key]:
            yield f"{what}: {before[key]} -> {after[key]}"
    learned = {entry["cell"]: entry["learned"] for entry in before["learned"]}
    for entry in after["learned"]:
        if learned.get(entry["cell"], entry["learned"]) != entry["learned"]:
            yield f"{entry['cell']}: BF16 learned: {learned[entry['cell']]} -> {entry['learned']}"
    for side, points in (("only in the old result", was.keys() - now.keys()), ("new", now.keys() - was.keys())):
        if points:
            places = sorted({f"{place} {arm}" for place, arm, _ in points})
            yield f"{side}: {len(points)} metrics of {', '.join(places[:6])}{' ...' if len(places) > 6 else ''}"


def _terminal(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index < 3 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell or DASH) for cell in row))
    return table
