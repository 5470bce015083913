"""The figures of trained arms: accuracy, gap, reward and throughput, one plotly document a cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from scipy.ndimage import median_filter

from quads.page_choices import ChosenFigure, Spec
from quads.suites.report_axes import arms_axis, errors, log_axis, with_axis
from quads.suites.report_numbers import interval, known
from quads.suites.report_style import Look, faint

Numbers = dict[str, Any]
LONG = 100  # steps from which on a curve is drawn as its running median
_GAPS = (
    ("gap_mean", "mean", "Mean of the step's tokens."),
    ("gap_p99", "99th percentile", "One token in a hundred differs by more."),
    ("gap_max", "largest", "The worst token of a step: grows with the number of tokens, so compare arms only."),
)


def figures(summary: Numbers, look: Look) -> Iterator[ChosenFigure]:
    """Every figure of the selected cell; none without outcomes. Arms of one cell share each figure."""
    cells = list(dict.fromkeys(row["cell"] for row in summary["outcomes"]))
    if not cells:
        return
    curves = {cell: [row for row in summary["curves"] if row["cell"] == cell] for cell in cells}
    rows = {cell: [row for row in summary["outcomes"] if row["cell"] == cell] for cell in cells}

    def over_steps(key: str, cell: str) -> Spec | None:
        axis = log_axis({curve["arm"]: curve.get(key) or () for curve in curves[cell]})
        return _over_steps(curves[cell], key, look, with_axis(_steps("|Δ log p|"), axis))

    longest = max(len(curve["steps"]) for curve in summary["curves"]) if summary["curves"] else 0
    smoothed = " Thick: running median." if longest > LONG else ""

    def figure(name: str, title: str, note: str, draw: Callable[[str], Spec | None]) -> ChosenFigure:
        specs = {cell: spec for cell in cells if (spec := draw(cell))}
        return ChosenFigure(name=name, title=title, note=note, specs=specs, by=("cell",))

    yield figure(
        "accuracy-end",
        "Held-out accuracy, before and after",
        "Greedy. Hollow: before training. Filled: after. Tick: the same weights in BF16. 95 % intervals.",
        lambda cell: _ends(rows[cell], curves[cell], look),
    )
    yield figure(
        "accuracy",
        "Held-out accuracy over steps",
        "Under the arm's rollout numerics; mean over seeds with its 95 % band.",
        lambda cell: _accuracy(curves[cell], look),
    )
    for key, title, note in _GAPS:
        yield figure(
            key.replace("_", "-"),
            f"Gap over steps: {title}",
            f"|log p trainer − log p rollout| of the same tokens, before the step's update. {note}{smoothed}",
            partial(over_steps, key),
        )
    yield figure(
        "reward",
        "Reward over steps",
        f"Mean reward of the sampled answers; every step asks other problems.{smoothed}",
        lambda cell: _over_steps(curves[cell], "reward", look, _steps("mean reward")),
    )
    yield figure(
        "throughput",
        "Rollout tokens a second",
        _speed_note(summary["label"]),
        lambda cell: _bars(rows[cell], "rollout_tokens_per_s", "tokens/s", look),
    )
    if any(known(row.get("memory_gib")) for row in summary["outcomes"]):
        yield figure(
            "memory",
            "Peak memory",
            "Largest allocation of the arm's process.",
            lambda cell: _bars(rows[cell], "memory_gib", "GiB", look),
        )


def _speed_note(label: str) -> str:
    shared = "Median step; runs shared the machine."
    if label.startswith("emulated"):
        return f"{label}: the speed of an emulation, which says nothing about 4-bit hardware. {shared}"
    return f"{label}. Emulated formats run at the emulator's speed, unless the arm's engine has kernels. {shared}"


def _steps(title: str) -> Numbers:
    return {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": title, "standoff": 8}, "automargin": True},
        "margin": {"l": 60, "r": 12, "t": 12, "b": 44},
        "showlegend": False,
        "hovermode": "x unified",
    }


def _over_steps(curves: list[Numbers], key: str, look: Look, layout: Numbers) -> Spec | None:
    drawn = [curve for curve in curves if any(known(value) for value in curve.get(key) or ())]
    long = any(len(curve[key]) > LONG for curve in drawn)
    lines = [trace for curve in drawn for trace in _line(curve, key, look, long)]
    return {"data": lines, "layout": layout} if lines else None


def _line(curve: Numbers, key: str, look: Look, long: bool) -> Iterator[Numbers]:
    """The values; where a run of the figure is `long` faintly, with their running median over them."""
    arm, line, values = curve["arm"], look.line(curve["arm"]), curve[key]
    if not long:
        yield look.trace(arm, x=curve["steps"], y=values, mode="lines", line=line)
        return
    faintly = {"color": faint(line["color"], 0.22), "width": 1}
    yield look.trace(arm, x=curve["steps"], y=values, mode="lines", line=faintly, hoverinfo="skip")
    median = median_filter(np.array(values, dtype=np.float64), size=2 * (len(values) // 60) + 1, mode="nearest")
    yield look.trace(arm, x=curve["steps"], y=median.tolist(), mode="lines", line=line)


def _accuracy(curves: list[Numbers], look: Look) -> Spec | None:
    bands, lines = [], []
    for curve in curves:
        arm, points = curve["arm"], curve["accuracy"]
        if not points["steps"]:
            continue
        lines.append(
            look.trace(
                arm, x=points["steps"], y=points["value"], mode="lines+markers", line=look.line(arm),
                marker=look.marker(arm, size=6),
            )
        )  # fmt: skip
        ends = [(s, lo, hi) for s, lo, hi in zip(*(points[k] for k in ("steps", "low", "high")), strict=True)
                if known(lo) and known(hi)]  # fmt: skip
        if ends:
            x = [step for step, *_ in ends]
            y = [low for _, low, _ in ends] + [high for *_, high in reversed(ends)]
            bands.append(
                look.trace(
                    arm, x=x + x[::-1], y=y, mode="lines", fill="toself", line={"width": 0}, hoverinfo="skip",
                    fillcolor=faint(look.colors[arm]),
                )
            )  # fmt: skip
    return {"data": bands + lines, "layout": _steps("share solved")} if lines else None


def _ends(rows: list[Numbers], curves: list[Numbers], look: Look) -> Spec | None:
    starts = {curve["arm"]: _first(curve["accuracy"]) for curve in curves}
    steps: dict[str, int] = dict.fromkeys([row["arm"] for row in rows], 0)
    steps |= {curve["arm"]: max(curve["accuracy"]["steps"], default=0) for curve in curves}
    labels = {arm: f"{arm}, step {step}" if len({*steps.values()}) > 1 else arm for arm, step in steps.items()}
    untrained = {curve["arm"] for curve in curves if list(curve["accuracy"]["steps"]) == [0]}
    data = []
    for row in rows:
        arm, color = row["arm"], look.colors[row["arm"]]
        tick = {"symbol": "line-ns", "size": 12, "line": {"width": 2.5, "color": color}}
        hollow = look.marker(arm, color="rgba(0,0,0,0)", line={"width": 1.5, "color": color})
        kinds = (
            ("as rolled out", row["accuracy"], look.marker(arm, size=10)),
            ("in BF16", row.get("trainer_accuracy"), tick),
            ("before training", starts.get(arm), hollow),
        )
        for kind, point, marker in kinds:
            if point and known(point.get("value")) and (kind == "before training" or arm not in untrained):
                bars = errors([point], color) if kind == "as rolled out" else None
                text = f"{arm}, {kind}: {interval(point)}"
                data.append(
                    look.trace(
                        arm, x=[point["value"]], y=[labels[arm]], mode="markers", marker=marker, text=[text],
                        hoverinfo="text",
                        **({"error_x": bars} if bars else {}),
                    )
                )  # fmt: skip
    layout = _lying([labels[row["arm"]] for row in rows], "share solved")
    return {"data": data, "layout": layout} if data else None


def _first(points: Numbers) -> Numbers | None:
    return {key: points[key][0] for key in ("value", "low", "high")} if points["steps"] else None


def _bars(rows: list[Numbers], key: str, title: str, look: Look) -> Spec | None:
    drawn = [row for row in rows if known(row.get(key))]
    data = [
        {"type": "bar", "orientation": "h", "name": row["arm"], "legendgroup": row["arm"], "x": [row[key]]}
        | {"y": [row["arm"]], "marker": {"color": look.colors[row["arm"]]}, "cliponaxis": False}
        | {"text": [f"{row[key]:,.4g}" if row[key] < 1000 else f"{row[key]:,.0f}"], "textposition": "outside"}
        for row in drawn
    ]
    return {"data": data, "layout": _lying([row["arm"] for row in drawn], title)} if data else None


def _lying(arms: list[str], title: str) -> Numbers:
    return {
        "xaxis": {"title": {"text": title}, "automargin": True},
        "yaxis": arms_axis(arms),
        "margin": {"l": 20, "r": 56, "t": 12, "b": 44},
        "height": 90 + 34 * max(len(arms), 3),
        "showlegend": False,
        "bargap": 0.35,
    }
