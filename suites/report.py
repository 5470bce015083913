"""`quads suite report`: a suite's results as one self-contained HTML page for a reader who has not read the paper.

Verdicts first, refuted and undecided as large as supported; then whether BF16 learned at all, the trained arms, the
probe, the paper's figures beside ours, and the stamp. Reads OUT/summary.json,
and OUT/stamp.json and OUT/suite.json where they are.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from quads import page
from quads.compare.records import write_atomically
from quads.errors import CannotRunHereError
from quads.page_choices import plot, selector, tick_boxes
from quads.suites import report_outcomes, report_probe
from quads.suites import report_tables as tables
from quads.suites.report_interval import drawing
from quads.suites.report_markdown import counts
from quads.suites.report_numbers import as_ratio, interval, number
from quads.suites.report_paper import claims
from quads.suites.report_style import Look
from quads.suites.report_words import meaning, words

Numbers = dict[str, Any]
SCHEMA = 1


class ReportError(ValueError):
    """Results that no report can be made of; the message names the file and the rule."""


def write(out: Path) -> Path:
    """Write OUT/report.html of OUT/summary.json; returns its path. ReportError, CannotRunHereError without plotly."""
    stamp, suite = (read_json(path) if (path := out / name).exists() else {} for name in ("stamp.json", "suite.json"))
    document = html(read_summary(out), stamp, suite.get("suite", {}))
    path = out / "report.html"
    write_atomically(path, document.encode())
    return path


def html(summary: Numbers, stamp: Numbers, suite: Numbers | None = None) -> str:
    """The page of a summary, its stamp and the resolved suite (empty where there is none)."""
    arms = list(dict.fromkeys(row["arm"] for row in (*summary["outcomes"], *summary["probe"])))
    look = Look(arms)
    cells = tables.cells(summary)
    return render(
        "report.html",
        f"quads suite: {summary['suite']}",
        summary=summary,
        cells=cells,
        about={cell: tables.about(cell, suite or {}) for cell in cells},
        run=tables.run_line(summary, suite or {}),
        words=words(),
        arms={arm: meaning(arm) for arm in arms},
        colors={
            "outcomes": _colors(look, [row["arm"] for row in summary["outcomes"]]),
            "probe": _colors(look, [row["arm"] for row in summary["probe"] if ":" not in row["arm"]]),
        },
        verdicts=counts(summary),
        choices={
            "cell": [(cell, cell) for cell in cells],
            "overview": tables.OVERVIEWS,
            **report_probe.choices(summary),
        },
        places=report_probe.places(summary),
        outcome_figures=list(report_outcomes.figures(summary, look)),
        probe_figures=list(report_probe.figures(summary, look)),
        claims={cell: claims(summary, cell) for cell in (cells or ("",))},
        settings=Markup(page.pairs(page.flat(summary["settings"]))),
        stamp=Markup(page.pairs(page.flat(_plain(stamp)))),
        commands=_commands(stamp),
    )


def render(template: str, title: str, **values: Any) -> str:
    """The page of a template of this folder."""
    folder = resources.files("quads").joinpath("suites")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(folder)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        **{function.__name__: _markup(function) for function in (plot, selector, tick_boxes)},
        **{function.__name__: function for function in (drawing, interval, number, as_ratio)},
        "tables": tables,
    }
    body = environment.get_template(template).render(**values)
    try:
        return page.page(title, body, style=folder.joinpath("report.css").read_text("utf-8"))
    except ImportError:
        raise CannotRunHereError("a report needs plotly: python -m pip install 'quads[report]'") from None


def read_summary(out: Path) -> Numbers:
    """OUT/summary.json, or the file itself; ReportError where there is none, or one of another schema."""
    path = out / "summary.json" if out.is_dir() else out
    summary = read_json(path)
    if not isinstance(summary, dict) or summary.get("schema") != SCHEMA or "hypotheses" not in summary:
        raise ReportError(f"{path} is no suite summary of schema {SCHEMA}: make it with `quads suite run`")
    return summary


def read_json(path: Path) -> Any:
    """The document of a JSON file; ReportError names the file that cannot be read."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} cannot be read: {error}") from None


def _colors(look: Look, arms: list[str]) -> dict[str, str]:
    return {arm: look.colors[arm] for arm in dict.fromkeys(arms)}


def _plain(stamp: Numbers) -> Numbers:
    """The stamp for readers: without those of other runs, whose commands are listed, and what it does not know."""
    return {key: value for key, value in stamp.items() if key not in ("earlier", "later") and value is not None}


def _commands(stamp: Numbers) -> list[str]:
    """Every command that wrote into the folder, oldest first, each once."""
    every = [*stamp.get("earlier", []), stamp, *stamp.get("later", [])]
    return list(dict.fromkeys(entry["command"] for entry in every if entry.get("command")))


def _markup(function: Any) -> Any:
    return lambda *args, **named: Markup(function(*args, **named))
