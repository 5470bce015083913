"""Rollouts as plots: tokens a second over the batch, measured and modelled, and the paper's figure among the ratios."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from quads.bench.figures import SYMBOLS, family, label, logarithmic, symbol_of, whiskers
from quads.bench.figures_model import predicted_name
from quads.bench.results import Result
from quads.bench.rollout_model import PAPER, Load, Model, arms, fits, models, tokens_per_s
from quads.bench.specs import REFERENCE, Chip, chips
from quads.compare.figures import color
from quads.page_choices import ChosenFigure, Spec

RATIOS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
RATIO_ARMS = ("quads-static", "quads-batch", "quads-token")
RATIO_BATCH = 128
_RATIO = {"title": {"text": "output tokens/s over FP8's"}, "rangemode": "tozero", "automargin": True}


def measured(results: Sequence[Result]) -> ChosenFigure:
    """Output tokens a second of measured rollouts over the batch."""
    rows = [one for one in results if one.op == "rollout"]
    return ChosenFigure(
        name="measured-rollouts",
        title="Rollout throughput",
        note="Output tokens/s of equal requests that start together, prefill included.",
        specs={"": _measured(rows)} if rows else {},
    )


def _measured(rows: Sequence[Result]) -> Spec:
    data = []
    for name in dict.fromkeys(map(label, rows)):
        own = sorted((one for one in rows if label(one) == name), key=lambda one: one.shape["batch"])
        speeds = [speed(one, host=True) for one in own]
        lows = [v * (1 - one.seconds / (one.seconds_high or one.seconds)) for v, one in zip(speeds, own, strict=True)]
        highs = [v * (one.seconds / (one.seconds_low or one.seconds) - 1) for v, one in zip(speeds, own, strict=True)]
        data.append({
            "type": "scatter", "mode": "lines+markers", "name": name, "legendgroup": family(own[0].numerics),
            "x": [one.shape["batch"] for one in own], "y": speeds, "error_y": whiskers(lows, highs),
            "line": {"color": color(family(own[0].numerics)), "width": 2},
            "marker": {"symbol": symbol_of(own[0], rows), "size": 8},
        })  # fmt: skip
    return {"data": data, "layout": logarithmic("batch", "output tokens/s", data)}


def modelled(predicted: Sequence[Result]) -> ChosenFigure:
    """Tokens a second over the batch, of every arm."""
    rows = [one for one in predicted if one.op == "rollout"]
    return ChosenFigure(
        name="rollouts",
        title="Modelled rollout throughput",
        note="Output tokens/s, 128 tokens in and 128 out; the GPU's time alone, as if the host were hidden behind it;"
        f" ×: measured over predicted times on the {REFERENCE}."
        " An arm whose weights and KV cache do not fit in memory has no point.",
        specs={key: _speeds(own) for key, own in _by_model(rows).items()},
        by=("chip", "model"),
    )


def against_fp8(predicted: Sequence[Result]) -> ChosenFigure:
    """Tokens a second over FP8's, with the paper's figure."""
    rows = [one for one in predicted if one.op == "rollout"]
    return ChosenFigure(
        name="against-fp8",
        title="Modelled rollout throughput against FP8",
        note=f"The grey line is the abstract's claim, about {PAPER - 1:.0%} over FP8 (chip, engine and batch not"
        " stated there; Blackwell and SGLang as summarised by third parties). Dotted: with the host's time as"
        f" fitted on the {REFERENCE}. Where the errors (×) of an arm and of FP8 differ, their ratio is off by as much.",
        specs={key: _ratios(own) for key, own in _by_model(rows).items()},
        by=("chip", "model"),
    )


def over_ratio() -> ChosenFigure:
    """Tokens a second over RAC's ratio, of each way to quantise with it."""
    return ChosenFigure(
        name="over-ratio",
        title="Modelled cost of RAC's ratio",
        note=f"Output tokens/s over those of W4A4 without RAC, batch {RATIO_BATCH}, GPU time alone. The"
        " step at the left is launches, the slope products and residuals.",
        specs={
            f"{key}|{name}": _over_ratio(model, on)
            for key, on in chips().items()
            for name, model in models().items()
            if fits(model, arms()["nvfp4"], Load(batch=RATIO_BATCH), on)
        },
        by=("chip", "model"),
    )


def _over_ratio(model: Model, on: Chip) -> Spec:
    load = Load(batch=RATIO_BATCH)
    naive = tokens_per_s(model, arms()["nvfp4"], load, on, host=False)
    data = []
    for place, name in enumerate(RATIO_ARMS):
        made = (dataclasses.replace(arms()[name], ratio=ratio) for ratio in RATIOS)
        data.append({
            "type": "scatter", "mode": "lines+markers", "name": f"quads {arms()[name].variant}, modelled",
            "legendgroup": "quads", "x": [100 * ratio for ratio in RATIOS],
            "y": [tokens_per_s(model, arm, load, on, host=False) / naive for arm in made],
            "line": {"color": color("quads"), "width": 2}, "marker": {"symbol": SYMBOLS[place], "size": 8},
        })  # fmt: skip
    layout = logarithmic("", "", height=400)
    layout["xaxis"] = {"title": {"text": "RAC ratio, per cent of K"}, "automargin": True}
    layout["yaxis"] = {"title": {"text": "over W4A4 without RAC"}, "rangemode": "tozero", "automargin": True}
    return {"data": data, "layout": layout}


def _by_model(rows: Sequence[Result]) -> dict[str, list[Result]]:
    """Rollouts by chip and model."""
    found: dict[str, list[Result]] = {}
    for one in rows:
        found.setdefault(f"{one.chip}|{one.way}", []).append(one)
    return found


def _speeds(rows: Sequence[Result]) -> Spec:
    data = [_line(rows, name, lambda one: speed(one, host=False)) for name in dict.fromkeys(map(label, rows))]
    return {"data": data, "layout": logarithmic("batch", "output tokens/s", data)}


def _ratios(rows: Sequence[Result]) -> Spec:
    fp8 = {one.shape["batch"]: one for one in rows if family(one.numerics) == "fp8"}
    others = [one for one in rows if one.shape["batch"] in fp8 and family(one.numerics) != "fp8"]
    data = []
    for name in dict.fromkeys(map(label, others)):
        for host in (False, True):

            def ratio(one: Result, host: bool = host) -> float:
                return speed(one, host=host) / speed(fp8[one.shape["batch"]], host=host)

            data.append(_line(others, name, ratio, faint=host))
    batches = sorted(fp8) or [1]
    data.append({
        "type": "scatter", "mode": "lines", "name": f"the abstract: about {PAPER}x", "x": [batches[0], batches[-1]],
        "y": [PAPER, PAPER], "line": {"color": "#888", "dash": "dash", "width": 2}, "hoverinfo": "name",
    })  # fmt: skip
    return {"data": data, "layout": {**logarithmic("batch", "", data), "yaxis": _RATIO}}


def _line(rows: Sequence[Result], name: str, value: Callable[[Result], float], *, faint: bool = False) -> Spec:
    own = [one for one in rows if label(one) == name]
    return {
        "type": "scatter", "mode": "lines+markers", "name": predicted_name(own[0]), "showlegend": not faint,
        "legendgroup": family(own[0].numerics), "x": [one.shape["batch"] for one in own],
        "y": [value(one) for one in own], "opacity": 0.5 if faint else 1.0,
        "line": {"color": color(family(own[0].numerics)), "dash": "dot" if faint else "solid", "width": 2},
        "marker": {"symbol": symbol_of(own[0], rows), "size": 8},
        "hovertext": [_hover(one) for one in own], "hoverinfo": "text",
    }  # fmt: skip


def speed(one: Result, *, host: bool) -> float:
    """Output tokens a second; `host` False: of a modelled rollout, with the host hidden behind the GPU."""
    seconds = one.seconds if host else one.in_a_row_seconds or one.seconds
    return one.shape["batch"] * one.shape["tokens_out"] / seconds


def _hover(one: Result) -> str:
    error = one.model_error
    said = f"{error.ratio:.2f} ({error.low:.2f} to {error.high:.2f})" if error else "unknown"
    return (
        f"{label(one)}, batch {one.shape['batch']}: {speed(one, host=False):,.0f} tokens/s, with host"
        f" {speed(one, host=True):,.0f}<br>measured / predicted on the {REFERENCE}: {said}"
    )
