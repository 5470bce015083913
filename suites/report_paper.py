"""The paper's figures beside this suite's, where they can be put beside each other, with why they differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quads.suites import report_tables as tables
from quads.suites.report_numbers import DASH, interval, known, number
from quads.suites.report_probe import parse_outliers, places, ratio_rows
from quads.suites.report_words import words

Numbers = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """Figures of the paper on one thing: rows (of which arm or ratio, theirs, ours), source, and why they differ."""

    what: str
    rows: list[tuple[str, str, str]]
    source: str
    why: str


def claims(summary: Numbers, cell: str) -> list[Claim]:
    """Every figure of the paper that this suite measured something like, for one cell ("": of a probe alone)."""
    found = []
    for entry in words()["paper"]:
        measured = _OURS[entry["ours"]]
        rows = [(of, f"{value:g}", measured(summary, cell, of)) for of, value in entry["values"].items()]
        if rows := [row for row in rows if row[2] != DASH]:
            found.append(Claim(entry["what"], rows, entry["source"], entry["why"]))
    return found


def _outcome(summary: Numbers, cell: str, arm: str) -> Numbers | None:
    return next((row for row in summary["outcomes"] if (row["cell"], row["arm"]) == (cell, arm)), None)


def _accuracy(summary: Numbers, cell: str, arm: str) -> str:
    row = _outcome(summary, cell, arm)
    accuracy = tables.trained_accuracy(summary, row) if row else None
    return interval(_times(100, accuracy)) if accuracy else DASH


def _largest(summary: Numbers, cell: str, arm: str) -> str:
    row = _outcome(summary, cell, arm)
    return f"{number(row['gap_max'])} ({row['gap_tokens']:,} tokens)" if row and known(row["gap_max"]) else DASH


def _over_naive(summary: Numbers, cell: str, arm: str) -> str:
    for row in summary["comparisons"]:
        if (row["cell"], row["metric"], row["arm"], row["against"]) == (cell, "outcome/accuracy", arm, "nvfp4"):
            return interval(_times(100, row, "difference"), signed=True, name="difference")
    return DASH


def _speed(summary: Numbers, cell: str, arm: str) -> str:
    fast, slow = _outcome(summary, cell, arm), _outcome(summary, cell, "fp8")
    if not (fast and slow and known(fast["rollout_tokens_per_s"]) and slow["rollout_tokens_per_s"]):
        return DASH
    ratio = fast["rollout_tokens_per_s"] / slow["rollout_tokens_per_s"]
    return f"{number(100 * (ratio - 1), signed=True)} (without FP4 hardware)"


def _collapse(summary: Numbers, cell: str, arm: str) -> str:
    row = _outcome(summary, cell, arm)
    if row is None:
        return DASH
    steps = [entry["step"] for entry in row["collapsed"]]
    return f"{min(steps)} (of {row['steps']})" if steps else f"none in {row['steps']} steps, {len(row['seeds'])} seeds"


def _ratio(summary: Numbers, cell: str, percent: str) -> str:
    """The largest gap at this ratio, norm and chance, of the first policy without outliers against Q(W)."""
    plain = [rows for (reference, _, outliers), rows in places(summary).items()
             if reference == "w4" and parse_outliers(outliers) == (0, 1.0)]  # fmt: skip
    curves = ratio_rows(plain[0], "w4") if plain else {}
    ratio = float(percent.removesuffix(" %"))
    texts = [f"{number(_largest_of(points[ratio]))} by {name}"
             for scope, name in (("batch", "norm"), ("random", "chance"))
             if ratio in (points := curves.get(scope, {}))]  # fmt: skip
    return ", ".join(texts) or DASH


def _largest_of(row: Numbers) -> Any:
    return row["gap_max"]["value"] if isinstance(row["gap_max"], dict) else row["gap_max"]


def _times(factor: float, row: Numbers, name: str = "value") -> Numbers:
    return {key: factor * row[key] if known(row.get(key)) else None for key in (name, "low", "high")}


_OURS: dict[str, Callable[[Numbers, str, str], str]] = {
    "accuracy": _accuracy,
    "gap_max": _largest,
    "ratio": _ratio,
    "over_naive": _over_naive,
    "speed": _speed,
    "collapse": _collapse,
}
