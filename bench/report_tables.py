"""The tables of a benchmark's report: goals, the model's errors, every chip's values and sources, all results."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from quads import page
from quads.bench import figures, table
from quads.bench.results import VERDICTS, Result
from quads.bench.specs import Value, chips, sources


def goals(measured: Sequence[Result]) -> str:
    rows = [[one.case, one.goal, table.reached(one), VERDICTS[one.goal_met]] for one in measured if one.goal]
    if not rows:
        return ""
    met = sum(row[3] == "met" for row in rows)
    body = _table(["case", "goal", "measured", ""], rows, "goals")
    return f"<details><summary>Goals: {met} of {len(rows)} met</summary>{body}</details>"


def errors(modelled: Sequence[Result]) -> str:
    """The model's error of each kind of case."""
    first: dict[tuple[str, ...], Result] = {}
    for one in modelled:
        first.setdefault((one.op, one.numerics, one.variant, one.implementation), one)
    rows = [
        [one.op, figures.label(one), table.error_of(one), str(one.model_error.cases), one.model_error.source]
        for one in first.values()
        if one.model_error
    ]
    header = ["operation", "case", "measured / predicted", "cases", "measured in"]
    return f"<h3>Error of the model</h3>{_table(header, rows, 'errors of the model', left=True)}"


def specifications() -> str:
    """Every value of every chip with kind and source."""
    known = sources()
    rows = [
        [key, name.replace("_", " "), f"{value.value:.5g}", value.kind, f"{known[value.source]} {value.note}"]
        for key, chip in chips().items()
        for name, value in vars(chip).items()
        if isinstance(value, Value)
    ]
    body = _table(["chip", "value", "", "kind", "source"], rows, "specifications", left=True)
    title = '<h3 id="chips-table">Chips</h3>'
    return f"{title}<details><summary>Every value and its source ({len(rows)})</summary>{body}</details>"


def everything(measured: Sequence[Result]) -> str:
    rows = [
        [
            one.case,
            f"{1e6 * one.seconds:,.2f}",
            _between(one),
            f"{1e6 * one.in_a_row_seconds:,.2f}" if one.in_a_row_seconds else "",
            *(f"{share:.0%}" if share else "" for share in (one.share_of_copy, one.share_of_matrix_peak)),
            f"{one.energy_j:.3g}" if one.energy_j else "",
            _conditions(one),
        ]
        for one in measured
    ]
    header = ["case", "us", "95 %", "in a row", "of copy", "of peak", "J", "clock, power, temperature"]
    count = f"All measured results ({len(rows)})"
    body = _table(header, rows, "all results")
    return f'<h2 id="all">All results</h2><details><summary>{count}</summary>{body}</details>'


def _between(one: Result) -> str:
    if one.seconds_low is None or one.seconds_high is None:
        return ""
    return f"{1e6 * one.seconds_low:,.2f}–{1e6 * one.seconds_high:,.2f}"


def _conditions(one: Result) -> str:
    seen = one.conditions
    parts = [
        f"{seen.sm_clock_mhz[1]:.0f} MHz" if seen.sm_clock_mhz else "",
        f"{seen.power_w:.0f} W" if seen.power_w else "",
        f"{seen.temperature_c:.0f} °C" if seen.temperature_c else "",
        seen.marked or "",
        *seen.throttle,
    ]
    return ", ".join(part for part in parts if part)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], name: str, *, left: bool = False) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in header)
    body = "".join(f"<tr><th>{html.escape(row[0])}</th>{_cells(row[1:])}</tr>" for row in rows)
    kind = ' class="left"' if left else ""
    return page.wide(f"<table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", name)


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"<td>{html.escape(text)}</td>" for text in texts)
