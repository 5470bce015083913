"""Figures of a report that depend on selectors, the selectors, and tick boxes that show or hide one series everywhere.

One page, many settings: a figure holds a plotly document for each setting and draws the chosen one, so that a report
of fourteen comparisons is as long as that of one. Selectors and tick boxes are the browser's own: the keyboard works.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]  # {"data": [trace, ...], "layout": {...}} as plotly.js takes it


@dataclass(frozen=True, kw_only=True)
class ChosenFigure:
    """One plot. name: element id, unique in the page; note: one sentence under the title, text.

    specs: values of the selectors `by`, joined by "|", -> plotly document; {"": document} without a selector.
    A trace whose `legendgroup` is the name of a tick box follows that box.
    """

    name: str
    title: str
    note: str
    specs: Mapping[str, Spec]
    by: tuple[str, ...] = ()


def plot(figure: ChosenFigure) -> str:
    """A section that draws the figure of the chosen setting, and says so where there is none."""
    return (
        f'<section><h3 id="{figure.name}-title">{html.escape(figure.title)}</h3><p>{html.escape(figure.note)}</p>'
        f'<div class="plot" id="{figure.name}" role="img" aria-labelledby="{figure.name}-title"></div>'
        f"<script>drawChosen({inline(figure.name)}, {inline(figure.specs)}, {inline(figure.by)})</script></section>"
    )


def selector(name: str, label: str, options: Sequence[tuple[str, str]]) -> str:
    """A labelled selector called `name` of (value, text); nothing to see where there is no choice.

    It stands before the figures that depend on it. Elements with the attribute data-only='{"NAME": "VALUE"}' show only
    while that value is chosen (of every name, where there are several).
    """
    if not options:
        return ""
    chosen = f"<script>set({inline(name)}, {inline(options[0][0])})</script>"
    if len(options) == 1:
        return chosen
    entries = "".join(f'<option value="{html.escape(value)}">{html.escape(text)}</option>' for value, text in options)
    return f'<label>{html.escape(label)} <select data-choice="{name}">{entries}</select></label>{chosen}'


def tick_boxes(legend: str, colors: Mapping[str, str]) -> str:
    """A box a series with its colour: the legend of every figure at once."""
    boxes = "".join(
        f'<label><input type="checkbox" checked data-series="{html.escape(name)}">'
        f'<span class="swatch" style="border-color:{color}"></span>{html.escape(name)}</label>'
        for name, color in colors.items()
    )
    return f'<fieldset aria-label="{html.escape(legend)}">{boxes}</fieldset>'


def inline(document: Any) -> str:
    """JSON that may stand in a script element: six digits, NaN and infinities (which JSON lacks) as null."""
    text = json.dumps(_finite(document), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
