"""A diagnosis for people: one self-contained HTML page, and the tables on a terminal."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from quads import diagnose_figures as figures
from quads import page
from quads.attribution.variants import REFERENCE, WEIGHTS

Document = dict[str, Any]
RANKED = 10

_STYLE = """
.advice { background: var(--band); color: var(--ink); padding: 12px 16px; border-left: 4px solid #2a9d6f; }
table { width: auto; } th, td { white-space: nowrap; } th:first-child, td:first-child { text-align: left; }
th { color: var(--dim); font-weight: 600; }
pre { background: var(--band); padding: 10px; overflow-x: auto; font-size: 12px; }
"""


def write_html(document: Document, stamp: dict[str, Any]) -> str:
    """The report as one HTML page with plotly.js packed into it once; `document` is what diagnose.json holds."""
    blocks = [
        f"<h1>quads diagnose: {html.escape(document['model'])}</h1>",
        f"<p>{html.escape(_subtitle(document))}</p>",
        *(f"<p>Note: {html.escape(note)}.</p>" for note in document["notes"]),
        f'<p class="advice">{html.escape(document["advice"])}</p>',
        "<h2>Gap of token log-probabilities</h2>",
        "<p>Mean |log p difference| of the same next token, teacher-forced: against the BF16 reference, and"
        " against Q(W) in BF16, which is what a QAT trainer computes. Interval: 95 % bootstrap over prompts of the"
        " mean. p50 to k3 are against BF16; k3 is a KL estimate for recorded rollouts only, elsewhere a distance. Layer"
        " error: ||Y - XW|| / ||XW||, mean over weights, each with the reference's own inputs.</p>",
        _table(*_gap_table(document)),
        *figures.sections(document),
        "<h2>Where from: terms</h2>",
        _table(*_term_table(document)),
    ]
    if document["isolated"]:
        blocks += ["<h2>Layers that move log-probabilities most, alone</h2>", _table(*_layer_table(document))]
        blocks += ["<h2>The worst layers kept in BF16</h2>", _table(*_kept_table(document))]
    blocks += ["<h2>Stamp</h2>", f"<pre>{html.escape(json.dumps(stamp, indent=1, default=str))}</pre>"]
    return page.page(f"quads diagnose: {document['model']}", "".join(blocks), style=_STYLE)


def print_tables(document: Document, console: Console) -> None:
    """Gap, layers and advice on a terminal."""
    header, rows = _gap_table(document)
    short = [0, 1, 4, 5, 7, 8, 9]  # what fits 80 columns; the report has all
    tables = [
        ("Gap of token log-probabilities", ([header[i] for i in short], [[row[i] for i in short] for row in rows]))
    ]
    if document["isolated"]:
        tables.append(("Layers alone, worst first", _layer_table(document)))
        tables.append(("W4A4 with the worst layers in BF16", _kept_table(document)))
    for title, (header, rows) in tables:
        table = Table(title=f"{title} ({document['label']})", padding=(0, 0), box=SIMPLE_HEAD)
        for index, column in enumerate(header):
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(document["advice"])


def _subtitle(document: Document) -> str:
    shape = f"{document['tokens']} tokens of {document['prompts']} sequences"
    selected = f"{document['weights']} weights in {document['layers']} layers"
    return f"{document['label']} · {shape} · {selected} · {document['seconds']} s ({document['cpu_seconds']} CPU s)"


def _table(header: list[str], rows: Iterable[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return page.wide(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", f"Table by {header[0]}")


def _gap_table(document: Document) -> tuple[list[str], list[list[str]]]:
    header = ["variant", "vs BF16", "interval", "p50", "p99", "max", "k3", "vs Q(W)", "interval", "layer error"]
    trainer = {row["variant"]: row for row in document["gaps"] if row["against"] == WEIGHTS}
    errors = {row["variant"]: row["mean"] for row in document["errors"] if row["against"] == REFERENCE}
    rows = []
    for row in document["gaps"]:
        if row["against"] != REFERENCE:
            continue
        name, other = row["variant"], trainer.get(row["variant"])
        second = [_number(other["mean"]), _interval(other)] if other else ["", ""]
        middle = [_number(row[key]) for key in ("p50", "p99", "max", "k3")]
        error = _percent(errors[name]) if name in errors else ""
        rows.append([name, _number(row["mean"]), _interval(row), *middle, *second, error])
    return header, rows


def _term_table(document: Document) -> tuple[list[str], list[list[str]]]:
    header = ["term", "mean |Δ log p|", "interval", "share of the squared gap", "source"]
    return header, [
        [row["term"], _number(row["mean"]), _interval(row), f"{100 * row['share']:.1f} %", row["source"]]
        for row in document["terms"]
    ]


def _layer_table(document: Document) -> tuple[list[str], list[list[str]]]:
    by_term = {(row["term"], row["layer"]): row for row in document["isolated"]}
    ranked = sorted((row for row in document["isolated"] if row["term"] == "both"), key=lambda row: -row["mean"])
    header = ["layer", "W4A4", "interval", "weights", "activations", "share of squares"]
    return header, [
        [
            str(row["layer"]),
            _number(row["mean"]),
            _interval(row),
            *(_number(by_term[term, row["layer"]]["mean"]) for term in ("weights", "activations")),
            f"{100 * row['share']:.1f} %",
        ]
        for row in ranked[:RANKED]
    ]


def _kept_table(document: Document) -> tuple[list[str], list[list[str]]]:
    header = ["layers in BF16", "mean vs BF16", "interval", "p99", "max"]
    return header, [
        [
            ", ".join(map(str, row["layers"])),
            _number(row["mean"]),
            _interval(row),
            _number(row["p99"]),
            _number(row["max"]),
        ]
        for row in document["kept"]
    ]


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share >= 1e-4 else f"{100 * share:.4f} %"


def _interval(row: dict[str, Any]) -> str:
    return f"{_number(row['low'])}–{_number(row['high'])}"
