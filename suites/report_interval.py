"""A hypothesis's interval as a small inline drawing: zero, the margin that decides, the interval and its middle."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from quads.suites.report_numbers import known, number

WIDTH, HEIGHT, _EDGE = 300, 44, 12


def drawing(entry: dict[str, Any]) -> Markup:
    """SVG of a hypothesis {difference, low, high, margin, direction, verdict}; empty where nothing was measured.

    The shaded side is where the claim holds. The scale is the entry's own: drawings compare with zero, not together.
    """
    low, high, margin = entry["low"], entry["high"], entry["margin"] or 0.0
    if not (known(low) and known(high) and known(entry["difference"])):
        return Markup()
    ends = [0.0, low, high, margin, -margin]
    pad = 0.08 * (max(ends) - min(ends)) or 1.0
    left, right = min(ends) - pad, max(ends) + pad

    def x(value: float) -> float:
        return round(_EDGE + (value - left) / (right - left) * (WIDTH - 2 * _EDGE), 1)

    start, end = {"lower": (left, -margin), "higher": (margin, right), "equal": (-margin, margin)}[entry["direction"]]
    bar = '<line class="bar" x1="{}" x2="{}" y1="{}" y2="{}"/>'
    return Markup(
        '<svg class="interval {verdict}" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" '
        'aria-label="{label}"><rect class="claim" x="{x0}" y="2" width="{width}" height="26"/>'
        '<line class="zero" x1="{zero}" x2="{zero}" y1="0" y2="30"/><text x="{zero}" y="42">0</text>'
        '{bars}<circle cx="{mid}" cy="15" r="5"/></svg>'
    ).format(
        verdict=entry["verdict"], w=WIDTH, h=HEIGHT, x0=x(start), width=round(max(x(end) - x(start), 0.0), 1),
        zero=x(0.0), mid=x(entry["difference"]),
        label=f"interval {number(low)} to {number(high)}; the claim holds in the shaded part",
        bars=Markup(bar.format(x(low), x(high), 15, 15) + "".join(bar.format(x(e), x(e), 9, 21) for e in (low, high))),
    )  # fmt: skip
