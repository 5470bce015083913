"""Figures of trained arms as plotly documents."""

from __future__ import annotations

from typing import Any

import pytest

from quads.page_choices import ChosenFigure
from quads.suites.report_outcomes import figures
from quads.suites.report_style import Look
from tests.suites.made_suite import ARMS, made_suite

go = pytest.importorskip("plotly.graph_objects")


def drawn(summary: dict[str, Any]) -> dict[str, ChosenFigure]:
    return {figure.name: figure for figure in figures(summary, Look(ARMS))}


def test_every_figure_has_a_document_a_cell_that_plotly_accepts() -> None:
    for name, figure in drawn(made_suite()).items():
        assert figure.specs.keys() == {"plain", "stress"}, name
        for spec in figure.specs.values():
            assert len(go.Figure(spec).data) >= len(ARMS), name


def test_the_gap_is_shown_by_mean_p99_and_maximum_on_logarithmic_axes() -> None:
    found = drawn(made_suite())
    for name in ("gap-mean", "gap-p99", "gap-max"):
        assert found[name].specs["plain"]["layout"]["yaxis"]["type"] == "log"


def test_an_arm_has_one_colour_in_every_figure_and_follows_its_tick_box() -> None:
    look = Look(ARMS)
    for figure in drawn(made_suite()).values():
        for trace in figure.specs["plain"]["data"]:
            shown = [trace.get("line", {}).get("color"), trace.get("marker", {}).get("color")]
            shown.append(trace.get("marker", {}).get("line", {}).get("color"))
            assert look.colors[trace["name"]] in shown or trace.get("fill")
            assert trace["legendgroup"] == trace["name"]


def test_accuracy_over_steps_has_a_band_from_low_to_high() -> None:
    summary = made_suite(cells=("plain",), arms=("bf16",))
    band, line = drawn(summary)["accuracy"].specs["plain"]["data"]
    points = summary["curves"][0]["accuracy"]
    assert band["y"] == points["low"] + points["high"][::-1]
    assert (line["x"], line["y"]) == (points["steps"], points["value"])


def test_accuracy_before_and_after_stand_on_the_arms_row_with_the_interval() -> None:
    summary = made_suite(cells=("plain",), arms=("bf16",))
    traces = drawn(summary)["accuracy-end"].specs["plain"]["data"]
    assert [trace["x"][0] for trace in traces] == pytest.approx([0.95, 0.952, 0.48])
    assert traces[0]["error_x"]["array"] == pytest.approx([0.01])
    assert "bf16, before training: 0.480 (0.460–0.500)" in traces[2]["text"]


def test_arms_that_were_last_evaluated_at_different_steps_say_at_which() -> None:
    summary = made_suite(cells=("plain",), arms=("bf16", "quads"))
    points = summary["curves"][0]["accuracy"]
    summary["curves"][0]["accuracy"] = {key: values[:3] for key, values in points.items()}
    spec = drawn(summary)["accuracy-end"].specs["plain"]
    assert spec["layout"]["yaxis"]["categoryarray"] == ["quads, step 60", "bf16, step 20"]
    assert {trace["y"][0] for trace in spec["data"]} == {"quads, step 60", "bf16, step 20"}


def test_an_arm_that_was_evaluated_at_its_start_alone_has_no_accuracy_after_training() -> None:
    summary = made_suite(cells=("plain",), arms=("bf16",))
    points = summary["curves"][0]["accuracy"]
    summary["curves"][0]["accuracy"] = {key: values[:1] for key, values in points.items()}
    (start,) = drawn(summary)["accuracy-end"].specs["plain"]["data"]
    assert "before training" in start["text"][0]


def test_nothing_is_drawn_of_what_was_not_measured() -> None:
    summary = made_suite(cells=("plain",), arms=("bf16", "quads"))
    summary["curves"][0] |= {"gap_p99": [], "accuracy": {key: [] for key in ("steps", "value", "low", "high")}}
    summary["curves"][1] |= {"gap_p99": [None] * 60}
    found = drawn(summary)
    assert found["gap-p99"].specs == {}
    assert {trace["name"] for trace in found["accuracy"].specs["plain"]["data"]} == {"quads"}
    assert "memory" not in found


def test_a_long_run_has_its_running_median_over_its_faint_values() -> None:
    summary = made_suite(cells=("plain",), arms=("bf16",), steps=1500)
    summary["curves"][0]["gap_max"][700] = 1e3  # one wild step
    figure = drawn(summary)["gap-max"]
    faint, thick = figure.specs["plain"]["data"]
    assert faint["y"][700] == 1e3
    assert len(thick["y"]) == 1500 and max(thick["y"]) < 1
    assert "running median" in figure.note


def test_memory_is_drawn_where_it_was_measured() -> None:
    summary = made_suite(cells=("plain",), arms=("bf16", "quads"))
    summary["outcomes"][1]["memory_gib"] = 3.25
    (bar,) = drawn(summary)["memory"].specs["plain"]["data"]
    assert (bar["name"], bar["x"]) == ("quads", [3.25])


def test_the_speed_of_an_emulation_is_called_that() -> None:
    assert "says nothing about 4-bit hardware" in drawn(made_suite())["throughput"].note
