"""The figures of the probe: RAC ratio with its random control, outlier sweep, attribution by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from quads.page_choices import ChosenFigure, Spec
from quads.suites.report_axes import errors, log_axis, with_axis
from quads.suites.report_numbers import interval, known
from quads.suites.report_style import SCOPES, TERMS, Look, colors
from quads.suites.results import recipe_of

Numbers = dict[str, Any]
REFERENCES = {
    "w4": "the weight-quantised model",
    "trainer": "each arm's own trainer",
    "bf16": "the unquantised model",
}
Place = tuple[str, str, str]  # reference, policy, outliers: the selectors of the probe


def figures(summary: Numbers, look: Look) -> Iterator[ChosenFigure]:
    """Every figure that the probe's records allow; none without a probe."""
    ratio = {"|".join(place): spec for place, rows in places(summary).items() if (spec := _ratio(rows, place[0]))}
    if ratio:
        yield ChosenFigure(
            name="ratio",
            title="What RAC leaves of the gap",
            note="Mean gap on fixed texts by share of compensated channels; 0 % is W4A4 without RAC. Chosen by what "
            "rounding lost (residual norm) or by chance; where the two meet, the choice does not matter.",
            specs=ratio,
            by=("reference", "policy", "outliers"),
        )
    yield from _sweeps(summary, look)
    if summary["layers"]:
        specs: dict[str, list[Numbers]] = defaultdict(list)
        for row in summary["layers"]:
            specs[f"{row['policy']}|{row['outliers']}"].append(row)
        yield ChosenFigure(
            name="layers",
            title="Where the gap comes from, layer by layer",
            note="Mean gap on fixed texts when this decoder layer alone is quantised.",
            specs={key: _layers(rows) for key, rows in specs.items()},
            by=("policy", "outliers"),
        )


def places(summary: Numbers) -> dict[Place, list[Numbers]]:
    """The probe's rows by reference, policy and outliers."""
    found: dict[Place, list[Numbers]] = defaultdict(list)
    for row in summary["probe"]:
        found[row["reference"], row["policy"], row["outliers"]].append(row)
    return dict(found)


def choices(summary: Numbers) -> dict[str, list[tuple[str, str]]]:
    """Selector -> (value, text) of the probe, in the records' order; Q(W) first, as a QAT trainer sees it."""
    found = [list(dict.fromkeys(values)) for values in zip(*places(summary), strict=True)] or [[], [], []]
    references, policies, outliers = found
    return {
        "reference": [(name, REFERENCES.get(name, name)) for name in sorted(references, reverse=True)],
        "policy": [(name, "start" if name == "start" else f"bf16 trained on {name}") for name in policies],
        "outliers": [(name, _outliers_text(name)) for name in outliers],
    }


def ratio_rows(rows: list[Numbers], reference: str) -> dict[str, dict[float, Numbers]]:
    """Scope -> ratio (%) -> row, of the arms that roll out W4A4; 0 % and 100 % belong to every scope.

    Against bf16 and w4 only the rollout's numerics matter, so `rac` and `quads` are the same point; against each
    arm's own trainer only arms with asymmetric QAT have the same reference.
    """
    curves: dict[str, dict[float, Numbers]] = defaultdict(dict)
    ends: dict[float, Numbers] = {}
    for row in rows:
        recipe = recipe_of(row["arm"])
        if recipe is None:
            continue
        plain = (recipe.weight_block, recipe.block_rule, recipe.activation_outer) == ("1x16", "six", "token")
        qat = (recipe.train_weights, recipe.train_activations) == ("nvfp4", "bf16")
        if recipe.rollout_activations != "nvfp4" or not plain or (reference == "trainer" and not qat):
            continue
        ratio = 100 * recipe.rac_ratio
        shared = ratio == 0 or recipe.rac_scope == "all"
        (ends if shared else curves[recipe.rac_scope]).setdefault(ratio, row)
    return {scope: dict(sorted({**ends, **points}.items())) for scope, points in curves.items()}


def parse_outliers(outliers: str) -> tuple[int, float] | None:
    """(channels, scale) of "8x16"; (0, 1.0) of "" (the policy as it is); None for another form."""
    if not outliers:
        return 0, 1.0
    channels, _, scale = outliers.partition("x")
    try:
        return int(channels), float(scale)
    except ValueError:
        return None


def _outliers_text(outliers: str) -> str:
    parsed = parse_outliers(outliers)
    if parsed is None:
        return outliers
    return "none" if parsed == (0, 1.0) else f"{parsed[0]} channels, {parsed[1]:g} times"


def _ratio(rows: list[Numbers], reference: str) -> Spec | None:
    curves = ratio_rows(rows, reference)
    data = [_ratio_line(scope, curves[scope], index) for index, scope in enumerate(s for s in SCOPES if s in curves)]
    if not data:
        return None
    floor = next((row["gap_mean"]["value"] for row in rows if row["arm"] == "engine"), None)
    if known(floor):
        data.append(
            {"type": "scatter", "name": "floor: another engine, same precision", "mode": "lines"}
            | {"x": [0, 100], "y": [floor, floor]}
            | {"line": {"color": colors(["engine"])["engine"], "width": 1.5, "dash": "dash"}}
        )
    layout = _layout("mean |Δ log p|", legend=True)
    layout["xaxis"] = {"title": {"text": "compensated channels (%)"}, "range": [-4, 104]}
    return {"data": data, "layout": layout | {"height": 350 + 19 * len(data)}}


def _ratio_line(scope: str, points: dict[float, Numbers], index: int) -> Numbers:
    """A scope's line; lines after the first stand a little aside, and leave the ends' intervals to the first."""
    label, color, symbol = SCOPES[scope]
    gaps = [row["gap_mean"] for row in points.values()]
    ends = [ratio in (0.0, 100.0) for ratio in points]
    own = [
        gap if index == 0 or not end else {**gap, "low": None, "high": None}
        for gap, end in zip(gaps, ends, strict=True)
    ]
    return (
        {
            "type": "scatter",
            "name": label,
            "x": [r if end else r + 0.6 * index for r, end in zip(points, ends, strict=True)],
        }
        | {"y": [gap["value"] for gap in gaps], "text": [row["arm"] for row in points.values()]}
        | {"mode": "lines+markers", "error_y": errors(own, color, 0.0), "marker": {"symbol": symbol, "size": 8}}
        | {"line": {"color": color, "width": 2, "dash": "dot" if scope == "random" else "solid"}}
    )


def _sweeps(summary: Numbers, look: Look) -> Iterator[ChosenFigure]:
    """One figure a number of outlier channels: mean gap by outlier size, a line an arm; 1 is the model as it is."""
    parsed = [(parse_outliers(row["outliers"]), row) for row in summary["probe"] if ":" not in row["arm"]]
    known_rows = [(place, row) for place, row in parsed if place and known(row["gap_mean"].get("value"))]
    for channels in sorted({place[0] for place, _ in known_rows} - {0}):
        by: dict[str, dict[str, dict[float, Numbers]]] = defaultdict(lambda: defaultdict(dict))
        for place, row in known_rows:
            if place[0] in (0, channels):
                by[f"{row['reference']}|{row['policy']}"][row["arm"]][place[1]] = row["gap_mean"]
        yield ChosenFigure(
            name=f"sweep-{channels}",
            title=f"Outliers in {channels} channels",
            note="Mean gap on fixed texts by the size of the outliers; 1 is the model without any.",
            specs={key: _sweep(arms, look) for key, arms in by.items()},
            by=("reference", "policy"),
        )


def _sweep(arms: dict[str, dict[float, Numbers]], look: Look) -> Spec:
    """Sizes at equal distances, arms beside each other within a size."""
    sizes = sorted({size for points in arms.values() for size in points})
    data = []
    for index, (arm, points) in enumerate(arms.items()):
        aside = 0.04 * (index - (len(arms) - 1) / 2)
        gaps = [points[size] for size in sizes if size in points]
        data.append(
            look.trace(
                arm,
                x=[place + aside for place, size in enumerate(sizes) if size in points],
                y=[gap["value"] for gap in gaps],
                text=[f"{size:g} times: {interval(points[size])}" for size in sizes if size in points],
                hovertemplate="%{text}",
                mode="lines+markers",
                error_y=errors(gaps, look.colors[arm], 0.0),
                line=look.line(arm),
                marker=look.marker(arm),
            )
        )
    axis = log_axis({arm: [gap["value"] for gap in points.values()] for arm, points in arms.items()})
    layout = with_axis(_layout("mean |Δ log p|"), axis)
    layout["xaxis"] = {"title": {"text": "outlier size (times)"}, "tickvals": list(range(len(sizes)))}
    layout["xaxis"]["ticktext"] = [f"{size:g}" for size in sizes]
    return {"data": data, "layout": layout}


def _layers(rows: list[Numbers]) -> Spec:
    rows = sorted(rows, key=lambda row: row["layer"])
    data = [
        {"type": "scatter", "name": label, "mode": "lines+markers", "x": [row["layer"] for row in rows]}
        | {"y": [_value(row.get(term)) for row in rows], "line": {"color": color, "width": 2}}
        | {"marker": {"symbol": symbol, "size": 8}}
        for term, (label, color, symbol) in TERMS.items()
        if any(known(_value(row.get(term))) for row in rows)
    ]
    layout = _layout("mean |Δ log p|", legend=True)
    layout["xaxis"] = {
        "title": {"text": "decoder layer"},
        "tickformat": "d",
        **({"dtick": 1} if len(rows) < 13 else {}),
    }
    return {"data": data, "layout": layout}


def _value(entry: Any) -> Any:
    return entry.get("value") if isinstance(entry, dict) else entry


def _layout(title: str, *, legend: bool = False) -> Numbers:
    """`legend`: of its own, above the plot, where the lines are no arms."""
    return {
        "yaxis": {
            "title": {"text": title, "standoff": 8},
            "automargin": True,
            "rangemode": "tozero",
        },
        "margin": {"l": 60, "r": 12, "t": 12, "b": 44},
        "hovermode": "closest",
        "showlegend": legend,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }
