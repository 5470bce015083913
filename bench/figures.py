"""What was measured, as plots: bars with intervals, and the roofline. One colour a numerics in all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quads.bench import roofline
from quads.bench.results import Result
from quads.bench.roofline import Roof
from quads.compare.figures import color
from quads.page_choices import ChosenFigure, Spec

ORDER = (
    "moe", "gemm", "rollout", "quantize", "quantize_rac", "fake_quantize", "outer_scale", "refit", "train_step",
    "emulator", "diagnose", "ceiling",
)  # fmt: skip
SYMBOLS = ("circle", "diamond", "square", "cross", "x", "triangle-up")
LEGEND = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"}


def family(numerics: str) -> str:
    """The numerics whose colour and tick box a result has: fp8_block is fp8."""
    return numerics.removesuffix("_block")


def label(result: Result) -> str:
    """A case without its operation and shape."""
    name = f"{result.numerics} {result.variant}".strip()
    return f"{name} · {result.implementation}"


def symbol_of(one: Result, among: Iterable[Result]) -> str:
    """A marker that tells implementations and variants of one numerics apart."""
    alike = list(dict.fromkeys(label(other) for other in among if family(other.numerics) == family(one.numerics)))
    return SYMBOLS[alike.index(label(one)) % len(SYMBOLS)]


def shown(shape: dict[str, int]) -> str:
    """A shape in words."""
    return ", ".join(f"{key} = {value:,}" for key, value in shape.items())


def time_of(result: Result) -> float:
    """Seconds of a call among others where that was measured, else alone."""
    return result.in_a_row_seconds or result.seconds


def by_group(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Cases of one operation and shape, in the order of ORDER."""
    groups: dict[str, list[Result]] = {}
    for one in sorted(results, key=lambda r: ORDER.index(r.op) if r.op in ORDER else len(ORDER)):
        groups.setdefault(f"{one.op}: {shown(one.shape)}", []).append(one)
    return groups


def bars(results: Sequence[Result]) -> ChosenFigure:
    """A bar a case of the chosen operation and shape, with the interval of its median."""
    return ChosenFigure(
        name="bars",
        title="Time of a call",
        note="Alone, caches cold; whiskers: 95 % interval of the median. † ran on a throttled or shared machine.",
        specs={group: _bars(rows) for group, rows in by_group(results).items()},
        by=("group",),
    )


def _bars(rows: list[Result]) -> Spec:
    """Each case a bar and, above it, its name and numbers: names beside bars would leave a phone no room."""
    traces = []
    for place, one in enumerate(rows[::-1]):
        middle, low, high = (1e6 * t for t in (one.seconds, one.seconds_low or one.seconds, end_of(one)))
        shared = {"showlegend": False, "legendgroup": family(one.numerics)}
        traces.append({
            "type": "bar", "orientation": "h", "x": [middle], "y": [place], "width": 0.4, **shared,
            "marker": {"color": color(family(one.numerics))}, "error_x": whiskers([middle - low], [high - middle]),
            "hovertext": [f"{one.case}<br>{one.method} {one.way}"], "hoverinfo": "text",
        })  # fmt: skip
        traces.append({
            "type": "scatter", "mode": "text", "x": [0], "y": [place + 0.42], "text": [_said(one)],
            "textposition": "middle right", "hoverinfo": "skip", **shared,
        })  # fmt: skip
    layout = {
        "margin": {"l": 10, "r": 10, "t": 5, "b": 45}, "height": 70 + 46 * len(rows), "barmode": "overlay",
        "xaxis": {"title": {"text": "microseconds"}, "rangemode": "tozero", "tickformat": ",~r"},
        "yaxis": {"visible": False, "range": [-0.4, len(rows) - 0.3]},
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def end_of(one: Result) -> float:
    """The upper end of a result's interval."""
    return one.seconds_high or one.seconds


def _said(one: Result) -> str:
    parts = [f"{label(one)}: {one.seconds * 1e6:,.1f} us"]
    for share, of in ((one.share_of_copy, "of copy"), (one.share_of_matrix_peak, "of peak")):
        if share and share >= 0.005:
            parts.append(f"{share:.0%} {of}")
    return ", ".join(parts) + (" †" if one.conditions.marked else "")


def whiskers(below: list[float], above: list[float]) -> dict[str, Any]:
    """Error bars that are not symmetric, in a grey that both papers show."""
    look = {"color": "#8a939e", "thickness": 1.5, "width": 3}
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, **look}


def roof(results: Sequence[Result]) -> ChosenFigure:
    """Every case with FLOPs under the roofs that the same run measured."""
    roofs = roofline.of_run(results)
    points = [(x, one) for one in results if (x := roofline.intensity(one)) and one.op in ("gemm", "moe")]
    specs = {"": _roofline(roofs, points)} if roofs and points else {}
    return ChosenFigure(
        name="roofline",
        title="Roofline",
        note="FLOPs and bytes as counted; the roofs are this run's own copy and products.",
        specs=specs,
    )


def _roofline(roofs: Sequence[Roof], points: Sequence[tuple[float, Result]]) -> Spec:
    low, high = min(x for x, _ in points) / 2, max([*(x for x, _ in points), *(r.ridge for r in roofs)]) * 2
    data = [line_of(one, low, high) for one in roofs]
    names = dict.fromkeys((family(one.numerics), one.op) for _, one in points)
    for numerics, op in names:
        own = [(x, one) for x, one in points if (family(one.numerics), one.op) == (numerics, op)]
        data.append({
            "type": "scatter", "mode": "markers", "name": f"{numerics}, {op}", "legendgroup": numerics,
            "x": [x for x, _ in own], "y": [(one.flops_per_s or 0.0) / 1e12 for _, one in own],
            "text": [f"{one.case}<br>{one.seconds * 1e6:,.1f} us" for _, one in own], "hoverinfo": "text",
            "marker": {"color": color(numerics), "size": 8, "symbol": "circle" if op == "gemm" else "diamond"},
        })  # fmt: skip
    return {"data": data, "layout": logarithmic("FLOPs per byte", "TFLOP/s", data)}


def line_of(one: Roof, low: float, high: float) -> Spec:
    """A roof as a line between two intensities."""
    xs = [low, min(max(one.ridge, low), high), high]
    return {
        "type": "scatter", "mode": "lines", "name": f"{one.numerics} roof ({one.kind})", "legendgroup": one.numerics,
        "x": xs, "y": [one.at(x) / 1e12 for x in xs], "hoverinfo": "name",
        "line": {"color": color(one.numerics), "width": 2},
    }  # fmt: skip


def logarithmic(x: str, y: str, data: Sequence[Spec] = (), **more: Any) -> dict[str, Any]:
    """A layout with two logarithmic axes for `data`, with fewer ticks where it spans more than three decades."""
    axes = {}
    for name, text in (("x", x), ("y", y)):
        values = [value for trace in data for value in trace[name] if value]
        wide = bool(values) and max(values) > 1e3 * min(values)
        axes[f"{name}axis"] = {
            "type": "log", "title": {"text": text}, "tickformat": ",~r", "dtick": 1 if wide else "D2",
            "automargin": True,
        }  # fmt: skip
    return {
        **axes, "margin": {"l": 70, "r": 20, "t": 10, "b": 50}, "height": 440, "showlegend": True,
        "legend": LEGEND, "hovermode": "closest", **more,
    }  # fmt: skip
