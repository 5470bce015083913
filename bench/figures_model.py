"""What is modelled, as plots: every title says so, bars are hatched and lines broken; the model's error is drawn."""

from __future__ import annotations

from collections.abc import Sequence

from quads.bench import model_error, roofline
from quads.bench.figures import LEGEND, SYMBOLS, by_group, family, label, line_of, logarithmic, time_of, whiskers
from quads.bench.results import Result
from quads.bench.specs import REFERENCE, chips
from quads.compare.figures import color
from quads.page_choices import ChosenFigure, Spec

_PATTERNS = ("/", "x", "-", "+", ".", "\\")


def checked(source: str, used: Sequence[Result]) -> ChosenFigure:
    """Predicted against measured times on the one chip where both are known."""
    calls = (one for one in used if one.op != "rollout")  # a rollout takes a thousand times as long
    pairs = [(one, time_of(one), time_of(one) / ratio) for one in calls if (ratio := model_error.ratio(one))]
    names = dict.fromkeys((family(one.numerics), one.op) for one, *_ in pairs)
    operations = list(dict.fromkeys(op for _, op in names))
    data = []
    for numerics, op in names:
        own = [pair for pair in pairs if (family(pair[0].numerics), pair[0].op) == (numerics, op)]
        data.append({
            "type": "scatter", "mode": "markers", "name": f"{numerics}, {op}", "legendgroup": numerics,
            "x": [1e6 * predicted for *_, predicted in own], "y": [1e6 * took for _, took, _ in own],
            "text": [f"{one.case}<br>measured / predicted {took / predicted:.2f}" for one, took, predicted in own],
            "hoverinfo": "text",
            "marker": {"color": color(numerics), "size": 8, "symbol": SYMBOLS[operations.index(op) % len(SYMBOLS)]},
        })  # fmt: skip
    ends = [5e5 * min(p for *_, p in pairs), 2e6 * max(p for *_, p in pairs)]
    data.append({
        "type": "scatter", "mode": "lines", "name": "measured = predicted", "x": ends, "y": ends, "hoverinfo": "skip",
        "line": {"color": "#888", "width": 1, "dash": "dash"},
    })  # fmt: skip
    return ChosenFigure(
        name="checked",
        title=f"The model where it can be checked: {REFERENCE}",
        note=f"Time of a call, measured ({source}) against predicted; above the line the model is too fast.",
        specs={"": {"data": data, "layout": logarithmic("predicted microseconds", "measured microseconds", data)}},
    )


def on_chips(modelled: Sequence[Result]) -> ChosenFigure:
    """The chosen case on every chip."""
    groups = by_group(one for one in modelled if one.op != "rollout")
    return ChosenFigure(
        name="chips",
        title="Modelled time of a call on each chip",
        note="Among others in a CUDA graph. ×: measured over predicted of such cases on the"
        f" {REFERENCE}, their median; whiskers: the prediction times the lowest and the highest.",
        specs={group: _on_chips(rows) for group, rows in groups.items()},
        by=("modelled",),
    )


def _on_chips(rows: list[Result]) -> Spec:
    data = []
    names = list(dict.fromkeys(map(label, rows)))
    for name in names:
        own = [one for one in rows if label(one) == name]
        first, times = own[0], [1e6 * time_of(one) for one in own]
        errors = [one.model_error for one in own]
        below = [t * (1 - min(1.0, e.low)) if e else 0.0 for t, e in zip(times, errors, strict=True)]
        above = [t * max(0.0, e.high - 1) if e else 0.0 for t, e in zip(times, errors, strict=True)]
        data.append({
            "type": "bar", "name": predicted_name(first), "legendgroup": family(first.numerics),
            "x": [one.chip for one in own], "y": times, "error_y": whiskers(below, above),
            "hovertext": [_hover(one) for one in own], "hoverinfo": "text",
            "marker": {"color": color(family(first.numerics)), "pattern": {"shape": _pattern(rows, first), "size": 6}},
        })  # fmt: skip
    return {"data": data, "layout": _bars("microseconds")}


def predicted_name(one: Result) -> str:
    """The name of a modelled series, with the model's error beside it."""
    return f"{label(one)}, modelled ({f'×{one.model_error.ratio:.2f}' if one.model_error else 'unchecked'})"


def _pattern(rows: Sequence[Result], one: Result) -> str:
    """Variants of one numerics differ in their hatching."""
    alike = list(dict.fromkeys(label(r) for r in rows if family(r.numerics) == family(one.numerics)))
    return _PATTERNS[alike.index(label(one)) % len(_PATTERNS)]


def _bars(y: str) -> dict[str, object]:
    return {
        "margin": {"l": 70, "r": 20, "t": 10, "b": 40}, "height": 460, "barmode": "group", "showlegend": True,
        "legend": LEGEND, "hovermode": "closest",
        "xaxis": {"automargin": True},
        "yaxis": {"type": "log", "title": {"text": y}, "tickformat": ",~r", "dtick": "D2", "automargin": True},
    }  # fmt: skip


def _hover(one: Result) -> str:
    error = one.model_error
    said = f"{error.ratio:.2f} ({error.low:.2f} to {error.high:.2f}, {error.cases} cases)" if error else "unknown"
    return f"{one.case}<br>{1e6 * time_of(one):,.1f} us, bound by {one.way}<br>measured / predicted on the H200: {said}"


def roofs() -> ChosenFigure:
    """Roofs of the chosen chip, with the ridge where memory and tensor cores bind alike."""
    specs = {}
    for key, chip in chips().items():
        found = roofline.of_chip(chip)
        data = [line_of(one, 1.0, 1e5) for one in found]
        specs[key] = {"data": data, "layout": logarithmic("FLOPs per byte", "TFLOP/s", data, height=380)}
    return ChosenFigure(
        name="roofs",
        title="Modelled roofs of a chip",
        note="What copies and products reach there, or are taken to reach (the legend says which); sources below.",
        specs=specs,
        by=("chip",),
    )
