"""The plots of report.html as plotly JSON: accuracy, gap over steps, throughput; one fixed colour an arm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from quads.compare.records import Record
from quads.compare.table import SPEED_NOTE
from quads.page import Figure

COLORS = {  # each at least 3:1 against a white and a black page
    "bf16": "#4c78a8",
    "fp8": "#2f938e",
    "nvfp4": "#e0484a",
    "quads": "#3f9a3c",
    "qat": "#b06fa0",
    "rac": "#b98a00",
    "w4a16": "#dd6a8f",
    "symmetric": "#a06a50",
    "trace": "#8572d6",
    "quads-random": "#8a8f98",
    "quads-full": "#7f9414",
}
_SPARE = ("#1f9bcf", "#d67195", "#a0cbe8", "#ffbf79", "#8cd17d")


def figures(runs: list[Record], evals: list[Record]) -> Iterator[Figure]:
    """Every plot of the report."""
    yield _lines(
        evals,
        ("eval/accuracy",),
        "accuracy",
        "Held-out accuracy",
        "Greedy, under the arm's rollout numerics; mean over seeds.",
        {"yaxis": {"title": {"text": "share solved"}, "rangemode": "tozero"}},
    )
    yield _lines(
        runs,
        ("reward/mean",),
        "reward",
        "Reward",
        "Mean reward of the step's sampled completions: noisy, as every step asks other problems.",
        {"yaxis": {"title": {"text": "mean reward"}}},
    )
    for key, title in (("gap/mean", "mean"), ("gap/p99", "99th percentile"), ("gap/max", "largest")):
        yield _lines(
            runs,
            (key,),
            key.replace("/", "-"),
            f"Gap over steps: {title} |log p trainer − log p rollout|",
            "Same tokens, same weights, before the step's update. Logarithmic axis.",
            {
                "yaxis": {
                    "type": "log",
                    "title": {"text": f"{title} |Δ log p|", "standoff": 16},
                    "tickmode": "linear",
                    "tick0": 0,
                    "dtick": 1,
                    "exponentformat": "power",
                    "automargin": True,
                }
            },
        )
    yield _bars(runs)


def color(arm: str) -> str:
    """The arm's colour; the same in every plot and report."""
    return COLORS.get(arm) or _SPARE[sum(arm.encode()) % len(_SPARE)]


def _lines(
    records: list[Record], keys: tuple[str, ...], name: str, title: str, note: str, layout: dict[str, Any]
) -> Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    for key in keys:
        for arm in dict.fromkeys(record["arm"] for record in records):
            steps, values = _mean_over_seeds(records, arm, key)
            marks = "lines+markers" if len(steps) < 30 else "lines"
            figure.add_scatter(x=steps, y=values, name=arm, mode=marks, line={"color": color(arm), "width": 2})
    figure.update_layout(_LAYOUT | {"xaxis": {"title": {"text": "step"}}} | layout)
    return name, title, note, figure.to_json()


def _bars(runs: list[Record]) -> Figure:
    import plotly.graph_objects as go

    figure, key = go.Figure(), "throughput/rollout_tokens_per_s"
    for arm in dict.fromkeys(record["arm"] for record in runs):
        speed = float(np.median([record[key] for record in runs if record["arm"] == arm]))
        figure.add_bar(x=[arm], y=[speed], name=arm, marker_color=color(arm), text=[f"{speed:,.0f}"])
    figure.update_layout(_LAYOUT | {"showlegend": False, "yaxis": {"title": {"text": "tokens/s, median"}}})
    return "throughput", "Rollout tokens per second", f"Measured, of {SPEED_NOTE}.", figure.to_json()


def _mean_over_seeds(records: list[Record], arm: str, key: str) -> tuple[list[int], list[float]]:
    by_step: dict[int, list[float]] = defaultdict(list)
    for record in records:
        if record["arm"] == arm:
            by_step[record["step"]].append(record[key])
    return list(by_step), [float(np.mean(values)) for values in by_step.values()]


_LAYOUT: dict[str, Any] = {
    "template": "none",
    "margin": {"l": 70, "r": 20, "t": 20, "b": 50},
    "hovermode": "x unified",
    "showlegend": True,
    "legend": {"orientation": "h", "y": 1.12},
}
