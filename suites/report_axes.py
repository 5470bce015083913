"""Axes and error bars that the report's figures share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from quads.suites.report_numbers import known

Numbers = dict[str, Any]
DEEP = 1000.0  # a line this far below the top would squeeze all others into a strip: it is named below the axis instead


def log_axis(lines: Mapping[str, Sequence[Any]]) -> Numbers:
    """Layout of a logarithmic y axis for named lines: `yaxis` and, where a line lies below the axis, `annotations`.

    Lines whose median lies more than DEEP below the largest value (bf16 where both of its sides share one
    implementation) are left below the axis and named there with that median.
    """
    axis: Numbers = {"type": "log", "tickformat": "~g", "nticks": 7}
    positive = {name: [v for v in values if known(v) and v > 0] for name, values in lines.items()}
    middles = {name: median(values) for name, values in positive.items() if values}
    top = max((max(values) for values in positive.values() if values), default=0.0)
    deep = {name: middle for name, middle in middles.items() if middle * DEEP < top}
    shown = [value for name, values in positive.items() if name not in deep for value in values]
    if not shown:
        return {"yaxis": axis}
    decades = math.log10(top / min(shown))
    if 0.6 < decades < 2.3:
        axis["dtick"] = "D2"  # ticks at 1, 2 and 5; plotly's own choice crowds here
    if not deep:
        return {"yaxis": axis}
    room = 0.1 * decades + 0.1
    axis["range"] = [math.log10(min(shown)) - 2 * room, math.log10(top) + room]
    names = ", ".join(f"{name} ({middle:.1e})" for name, middle in deep.items())
    below = {"text": f"below the axis: {names}", "showarrow": False, "xref": "paper", "yref": "paper"}
    return {"yaxis": axis, "annotations": [below | {"x": 0.01, "y": 0.01, "xanchor": "left", "yanchor": "bottom"}]}


def arms_axis(arms: list[str]) -> Numbers:
    """A vertical axis of arms, first on top."""
    return {"type": "category", "categoryorder": "array", "categoryarray": arms[::-1], "automargin": True}


def errors(rows: list[Numbers], color: str, least: float = -math.inf) -> Numbers:
    """plotly error bars of rows {value, low, high}, cut at `least`; none where the interval is unknown."""
    up = [row["high"] - row["value"] if known(row.get("high")) else 0 for row in rows]
    down = [row["value"] - max(row["low"], least) if known(row.get("low")) else 0 for row in rows]
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "color": color, "thickness": 1.5}


def with_axis(layout: Numbers, axis: Numbers) -> Numbers:
    """`layout` with the axis of `log_axis` laid over its own."""
    return {**layout, **axis, "yaxis": {**layout["yaxis"], **axis["yaxis"]}}
