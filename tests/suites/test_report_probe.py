"""Figures of the probe as plotly documents."""

from __future__ import annotations

from typing import Any

import pytest

from quads.page_choices import ChosenFigure
from quads.suites.report_probe import choices, figures, parse_outliers, places, ratio_rows
from quads.suites.report_style import SCOPES, Look
from tests.suites.made_suite import PROBED, made_suite

go = pytest.importorskip("plotly.graph_objects")


def drawn(summary: dict[str, Any]) -> dict[str, ChosenFigure]:
    return {figure.name: figure for figure in figures(summary, Look(PROBED))}


def points(reference: str, *arms: str) -> dict[str, list[str]]:
    """Scope -> arms of its ratio curve."""
    curves = ratio_rows([{"arm": arm} for arm in arms], reference)
    return {scope: [row["arm"] for row in rows.values()] for scope, rows in curves.items()}


def test_every_figure_has_documents_that_plotly_accepts() -> None:
    found = drawn(made_suite())
    assert found.keys() == {"ratio", "sweep-8", "sweep-32", "layers"}
    for figure in found.values():
        for spec in figure.specs.values():
            go.Figure(spec)


def test_the_ratio_curve_has_a_line_a_scope_with_the_random_control_among_them() -> None:
    data = drawn(made_suite())["ratio"].specs["w4|start|"]["data"]
    assert [trace["name"] for trace in data] == [
        *(SCOPES[scope][0] for scope in ("batch", "token", "random")),
        "floor: another engine, same precision",
    ]
    by_name = {trace["name"]: trace for trace in data}
    assert by_name[SCOPES["batch"][0]]["x"] == pytest.approx([0, 12.5, 25, 50, 75, 100])
    assert by_name[SCOPES["random"][0]]["x"] == pytest.approx([0, 13.7, 26.2, 51.2, 76.2, 100])  # aside, to be seen
    assert by_name[SCOPES["random"][0]]["text"][3] == "quads-random"
    assert by_name[SCOPES["token"][0]]["x"] == pytest.approx([0, 50.6, 100])


def test_ratio_curves_meet_at_naive_and_at_the_full_residual() -> None:
    assert points("w4", "engine", "bf16", "fp8", "nvfp4", "qat", "rac", "quads", "quads-random", "quads-full") == {
        "batch": ["nvfp4", "rac", "quads-full"],  # rac rolls out as quads does: one point
        "random": ["nvfp4", "quads-random", "quads-full"],
    }


def test_against_their_own_trainers_only_arms_with_asymmetric_qat_share_a_curve() -> None:
    assert points("trainer", "nvfp4", "qat", "symmetric", "rac", "quads") == {"batch": ["qat", "quads"]}


def test_arms_with_other_block_rules_are_no_part_of_the_ratio_curve() -> None:
    assert points("w4", "quads:block_rule=four_over_six") == {}


def test_a_sweep_starts_at_the_model_without_outliers() -> None:
    spec = drawn(made_suite())["sweep-32"].specs["w4|start"]
    data = spec["data"]
    nvfp4 = next(trace for trace in data if trace["name"] == "nvfp4")
    assert nvfp4["x"] == pytest.approx([0, 1, 2], abs=0.2)
    assert spec["layout"]["xaxis"]["ticktext"] == ["1", "4", "16"]
    assert nvfp4["text"][2].startswith("16 times: 0.13")
    assert nvfp4["y"] == pytest.approx([0.004, 0.004 * 9, 0.004 * 33])
    assert not any(":" in trace["name"] for trace in data)


def test_a_sweep_of_one_size_needs_no_plain_model() -> None:
    spec = drawn(made_suite(outliers=("8x16",)))["sweep-8"].specs["w4|start"]
    assert spec["layout"]["xaxis"]["ticktext"] == ["16"]
    assert {len(trace["x"]) for trace in spec["data"]} == {1}


def test_arms_of_a_sweep_stand_beside_each_other() -> None:
    data = drawn(made_suite())["sweep-8"].specs["w4|start"]["data"]
    assert len({trace["x"][0] for trace in data}) == len(data)


def test_an_interval_that_reaches_below_zero_is_cut_there() -> None:
    summary = made_suite()
    for row in summary["probe"]:
        row["gap_mean"]["low"] = -1.0
    line = drawn(summary)["ratio"].specs["w4|start|"]["data"][0]
    assert line["error_y"]["arrayminus"] == pytest.approx(line["y"])


def test_attribution_has_a_line_a_term_over_the_layers() -> None:
    data = drawn(made_suite())["layers"].specs["start|8x16"]["data"]
    assert [trace["name"] for trace in data] == [
        *("weights only", "activations only", "both (W4A4)", "both, with RAC 50 %")
    ]
    assert data[1]["x"] == [0, 1, 2, 3]
    assert data[1]["y"] == pytest.approx([0.004, 0.005, 0.006, 0.007])


def test_selectors_offer_what_was_measured_weight_quantised_reference_first() -> None:
    offered = choices(made_suite(outliers=("", "8x16")))
    assert [value for value, _ in offered["reference"]] == ["w4", "bf16"]
    assert offered["policy"] == [("start", "start")]
    assert offered["outliers"] == [("", "none"), ("8x16", "8 channels, 16 times")]
    assert choices(made_suite(probed=())) == {"reference": [], "policy": [], "outliers": []}


def test_every_choice_of_the_selectors_has_its_rows() -> None:
    summary = made_suite()
    offered = choices(summary)
    assert len(places(summary)) == len(offered["reference"]) * len(offered["policy"]) * len(offered["outliers"])


@pytest.mark.parametrize(("outliers", "parsed"), [("", (0, 1.0)), ("8x16", (8, 16.0)), ("many", None)])
def test_outliers_are_channels_times_scale(outliers: str, parsed: Any) -> None:
    assert parse_outliers(outliers) == parsed
