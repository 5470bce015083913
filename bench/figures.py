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


def family(numerics: str) -> str:
    """The numerics whose colour and tick box a result has: fp8_block is fp8."""
    return numerics.removesuffix("_block")


def label(result: Result) -> str:
    """A case without its operation and shape."""
    name = f"{result.numerics} {result.variant}".strip()
    return f"{name} · {result.implementation}"


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
    traces = []
    for one in rows[::-1]:
        middle, low, high = (1e6 * t for t in (one.seconds, one.seconds_low or one.seconds, end_of(one)))
        traces.append({
            "type": "bar", "orientation": "h", "x": [middle], "y": [_marked(one)], "showlegend": False,
            "legendgroup": family(one.numerics), "marker": {"color": color(family(one.numerics))},
            "error_x": whiskers([middle - low], [high - middle]), "text": [_said(one)], "textposition": "outside",
            "cliponaxis": False, "hovertext": [f"{one.case}<br>{one.method} {one.way}"], "hoverinfo": "text",
        })  # fmt: skip
    layout = {
        "margin": {"l": 250, "r": 90, "t": 10, "b": 45}, "height": 90 + 30 * len(rows), "barmode": "overlay",
        "xaxis": {"title": {"text": "microseconds"}, "range": [0, 1.45e6 * max(map(end_of, rows))]},
        "yaxis": {"automargin": True},
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def end_of(one: Result) -> float:
    """The upper end of a result's interval."""
    return one.seconds_high or one.seconds


def _marked(one: Result) -> str:
    return label(one) + (" †" if one.conditions.marked else "")


def _said(one: Result) -> str:
    parts = [f"\u2002{one.seconds * 1e6:,.1f}"]  # a space clear of the whisker
    for share, of in ((one.share_of_copy, "of copy"), (one.share_of_matrix_peak, "of peak")):
        if share and share >= 0.005:
            parts.append(f"{share:.0%} {of}")
    return " · ".join(parts)


def whiskers(below: list[float], above: list[float]) -> dict[str, Any]:
    """Error bars that are not symmetric, in a grey that both papers show."""
    look = {"color": "#8a939e", "thickness": 1.5, "width": 3}
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, **look}


def roof(results: Sequence[Result]) -> ChosenFigure:
    """Every case with FLOPs under the roofs that the same run measured."""
    roofs = roofline.of_run(results)
    points = [(x, one) for one in results if (x := roofline.intensity(one)) and one.op in ("gemm", "moe", "emulator")]
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
    return {"data": data, "layout": logarithmic("FLOPs per byte", "TFLOP/s")}


def line_of(one: Roof, low: float, high: float) -> Spec:
    """A roof as a line between two intensities."""
    xs = [low, min(max(one.ridge, low), high), high]
    return {
        "type": "scatter", "mode": "lines", "name": f"{one.numerics} roof ({one.kind})", "legendgroup": one.numerics,
        "x": xs, "y": [one.at(x) / 1e12 for x in xs], "hoverinfo": "name",
        "line": {"color": color(one.numerics), "width": 2},
    }  # fmt: skip


def logarithmic(x: str, y: str, **more: Any) -> dict[str, Any]:
    """A layout with two logarithmic axes."""
    axes = {
        f"{name}axis": {"type": "log", "title": {"text": text}, "tickformat": ",~r", "dtick": "D2", "automargin": True}
        for name, text in (("x", x), ("y", y))
    }
    return {
        **axes, "margin": {"l": 70, "r": 20, "t": 10, "b": 50}, "height": 440, "showlegend": True,
        "legend": {"orientation": "h", "y": -0.2, "yanchor": "top"}, "hovermode": "closest", **more,
    }  # fmt: skip
