"""A suite's results as Markdown, for READMEs of published results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from quads.suites import report_tables as tables
from quads.suites.config import VERDICTS
from quads.suites.report_numbers import DASH, interval, number

Numbers = dict[str, Any]


def table(summary: Numbers) -> str:
    """Hypotheses with verdicts, whether BF16 learned, outcomes cell by cell, collapses, the probe's mean gaps."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(_parts(summary)) + "\n")


def counts(summary: Numbers) -> str:
    """`2 supported, 1 refuted, 0 undecided`."""
    counted = Counter(entry["verdict"] for entry in summary["hypotheses"])
    return ", ".join(f"{counted[verdict]} {verdict}" for verdict in VERDICTS)


def _parts(summary: Numbers) -> Iterator[str]:
    yield f"Label: **{summary['label']}**.\n"
    if summary["hypotheses"]:
        yield f"Of {len(summary['hypotheses'])} hypotheses: {counts(summary)}.\n"
        yield _markdown(_hypotheses(summary))
    for entry in summary["learned"]:
        yield f"* `{entry['cell']}`: {tables.learned_line(entry)}"
    for cell in tables.cells(summary):
        yield f"\n### {cell}\n\n{_markdown(tables.outcomes(summary, cell))}"
    if summary["outcomes"]:
        fallen = tables.collapses(summary)
        yield "\n### Collapses\n\n" + (_markdown(fallen) if fallen.rows else "No run collapsed.\n")
    for (policy, reference), gaps in _gaps(summary).items():
        yield f"\n### Probe: mean gap of `{policy}` against {reference}\n\n{_markdown(_crossed(gaps))}"
    for note in summary["noted"]:
        yield f"* {note}"


def _hypotheses(summary: Numbers) -> tables.Table:
    return tables.Table(
        ("verdict", "claim", "difference (95 % interval)", "detectable", "pairs", "why"),
        [
            (
                f"**{entry['verdict']}**",
                f"{entry['claim']} ({entry['source']}; `{entry['metric']}`, {tables.versus(entry)}, {entry['where']})",
                interval(entry, signed=True, name="difference"),
                number(entry["mde"]),
                number(entry["pairs"]),
                entry["why"],
            )
            for entry in summary["hypotheses"]
        ],
    )


def _gaps(summary: Numbers) -> dict[tuple[str, str], dict[tuple[str, str], str]]:
    """(policy, reference) -> (arm, outliers) -> mean gap with its interval."""
    found: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for row in summary["probe"]:
        gaps = found.setdefault((row["policy"], row["reference"]), {})
        gaps[row["arm"], row["outliers"] or "no outliers"] = interval(row["gap_mean"])
    return found


def _crossed(gaps: dict[tuple[str, str], str]) -> tables.Table:
    """Arms by outliers, the longer list downwards."""
    arms, outliers = (list(dict.fromkeys(names)) for names in zip(*gaps, strict=True))
    if len(arms) >= len(outliers):
        return tables.Table(("", *outliers), [(a, *(gaps.get((a, o), DASH) for o in outliers)) for a in arms])
    return tables.Table(("", *arms), [(o, *(gaps.get((a, o), DASH) for a in arms)) for o in outliers])


def _markdown(content: tables.Table) -> str:
    lines = [content.header, ["---"] * len(content.header), *content.rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
