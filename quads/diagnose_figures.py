"""The figures of a diagnosis report. Colours are fixed per kind of variant; greys read on light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import plotly.graph_objects as go

from quads import page
from quads.attribution.variants import ACTIVATIONS, BOTH, ENGINE, WEIGHTS

COLORS = {
    "weights": "#3b82c4",
    "activations": "#e0812c",
    "both": "#d1495b",
    "engine": "#8a8f98",
    "recorded": "#b0892f",
    "rac": "#2a9d6f",
    "token": "#1fa3a8",
    "random": "#9b6dd0",
}
LADDERS = {"rac": "top residual (batch)", "token": "top residual (per token)", "random": "random (control)"}
_GREY, _GRID = "#808892", "rgba(128,136,146,0.25)"
TERMS = (WEIGHTS, ACTIVATIONS, BOTH)
Document = dict[str, Any]


def sections(document: Document) -> Iterator[str]:
    """Headed figures as markup of a `quads.page.page`."""
    plans = [
        ("What each RAC ratio leaves of the gap to a QAT trainer", _ratio_figure(document)),
        ("Output error by decoder layer", _layer_figure(document)),
        ("Activation error by layer and projection", _heatmap(document)),
        ("By token position", _position_figure(document)),
    ]
    if document["isolated"]:
        plans.insert(1, ("One decoder layer quantised alone", _isolated_figure(document)))
        plans.insert(2, ("One kind of projection quantised alone", _projection_figure(document)))
    if document["experts"]:
        plans.append(("Activation error by expert", _expert_figure(document)))
    for index, (title, figure) in enumerate(plans):
        yield page.plot((f"figure-{index}", title, "", figure.to_json()))


def _figure(traces: list[Any], x: str, y: str, **layout: Any) -> go.Figure:
    axis = {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": _GRID}
    figure = go.Figure(traces)
    figure.update_layout(
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": _GREY, "size": 13},
        margin={"l": 70, "r": 20, "t": 20, "b": 50},
        height=380,
        legend={"orientation": "h", "y": 1.12},
        **layout,
    )
    figure.update_xaxes(title=x, **axis)
    figure.update_yaxes(title=y, **axis)
    return figure


def _error_bars(rows: list[dict[str, Any]]) -> dict[str, Any]:
    up, down = [row["high"] - row["mean"] for row in rows], [row["mean"] - row["low"] for row in rows]
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1, "color": _GREY}


def _ratio_figure(document: Document) -> go.Figure:
    """Mean gap against Q(W) by ratio; ratio 0 is naive W4A4, 100 % is common to all scopes."""
    rows = {row["variant"]: row for row in document["gaps"] if row["against"] == WEIGHTS}
    traces = []
    for kind, label in LADDERS.items():
        names = [name for name in rows if name.startswith(f"{kind}-")]
        for suffix in sorted({name.partition("-")[2].partition("-")[2] for name in names}):
            mine = [name for name in names if name.partition("-")[2].partition("-")[2] == suffix]
            chain = [(0.0, rows[BOTH]), *((_percent(name), rows[name]) for name in mine)]
            if "rac-100" in rows and kind != "rac":
                chain.append((100.0, rows["rac-100"]))
            traces.append(
                go.Scatter(
                    x=[ratio for ratio, _ in chain],
                    y=[row["mean"] for _, row in chain],
                    error_y=_error_bars([row for _, row in chain]),
                    name=f"{label} {suffix}".strip(),
                    line={"color": COLORS[kind], "dash": "dot" if suffix not in ("", "s0") else "solid"},
                )
            )
    return _figure(traces, "RAC ratio (% of channels)", "mean |Δ log p| against Q(W)", yaxis_rangemode="tozero")


def _percent(variant: str) -> float:
    return float(variant.partition("-")[2].partition("-")[0])


def _isolated_figure(document: Document) -> go.Figure:
    return _grouped_bars(document["isolated"], "layer", "decoder layer")


def _projection_figure(document: Document) -> go.Figure:
    return _grouped_bars(document["projections"], "projection", "projection")


def _grouped_bars(table: list[dict[str, Any]], key: str, title: str) -> go.Figure:
    traces = []
    for term in TERMS:
        mine = [row for row in table if row["term"] == term]
        traces.append(
            go.Bar(
                x=[row[key] for row in mine],
                y=[row["mean"] for row in mine],
                error_y=_error_bars(mine),
                name=term,
                marker_color=COLORS[term],
            )
        )
    return _figure(traces, title, "mean |Δ log p|", barmode="group")


def _layer_figure(document: Document) -> go.Figure:
    """Relative output error, root mean square over a layer's weights."""
    layers = sorted({row["layer"] for row in document["sites"]})
    shown = [(WEIGHTS, WEIGHTS), (ACTIVATIONS, ACTIVATIONS), (BOTH, BOTH), ("rac-50", "rac"), ("rac-100", "rac")]
    traces = []
    for name, kind in shown:
        if name not in document["sites"][0]:
            continue
        means = []
        for layer in layers:
            squares = [row[name] ** 2 for row in document["sites"] if row["layer"] == layer and row[name] is not None]
            means.append(100 * (sum(squares) / len(squares)) ** 0.5 if squares else None)
        dash = "dot" if name == "rac-100" else "solid"
        traces.append(go.Scatter(x=layers, y=means, name=name, line={"color": COLORS[kind], "dash": dash}))
    return _figure(traces, "decoder layer", "relative output error (%)", yaxis_rangemode="tozero")


def _heatmap(document: Document) -> go.Figure:
    layers = sorted({row["layer"] for row in document["sites"]})
    projections = list(dict.fromkeys(row["projection"] for row in document["sites"]))
    table = {(row["layer"], row["projection"]): row[ACTIVATIONS] for row in document["sites"]}
    cells = [[_percentage(table.get((layer, name))) for layer in layers] for name in projections]
    heat = go.Heatmap(x=layers, y=projections, z=cells, colorscale="Viridis", colorbar={"title": "%"})
    return _figure([heat], "decoder layer", "")


def _percentage(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _position_figure(document: Document) -> go.Figure:
    traces = []
    for name in (WEIGHTS, ACTIVATIONS, BOTH, ENGINE, "recorded"):
        rows = [row for row in document["positions"] if row["variant"] == name]
        if rows:
            x, y = [row["position"] for row in rows], [row["gap"] for row in rows]
            traces.append(go.Scatter(x=x, y=y, name=name, line={"color": COLORS[name]}))
    return _figure(traces, "position of the predicted token", "mean |Δ log p|", yaxis_rangemode="tozero")


def _expert_figure(document: Document) -> go.Figure:
    """Every expert of every layer as a point."""
    traces = []
    for projection in dict.fromkeys(row["projection"] for row in document["experts"]):
        rows = [row for row in document["experts"] if row["projection"] == projection]
        x, y = [row["layer"] for row in rows], [_percentage(row[ACTIVATIONS]) for row in rows]
        text = [f"expert {row['expert']}" for row in rows]
        traces.append(go.Scatter(x=x, y=y, text=text, mode="markers", name=projection, marker={"size": 5}))
    return _figure(traces, "decoder layer", "relative output error (%)")
