"""Axes that the report's figures share."""

from __future__ import annotations

import math

import pytest

from quads.suites.report_axes import errors, log_axis


def test_a_line_far_below_the_others_is_named_below_the_axis_with_its_median() -> None:
    layout = log_axis({"bf16": [3e-7, 2e-7, 4e-7], "nvfp4": [0.01, 0.02, 0.04], "quads": [0.008, 0.01, 0.012]})
    assert layout["annotations"][0]["text"] == "below the axis: bf16 (3.0e-07)"
    low, high = (10**end for end in layout["yaxis"]["range"])
    assert 3e-7 < low < 0.008 and 0.04 < high < 0.1


def test_lines_within_three_decades_choose_their_own_axis() -> None:
    assert log_axis({"bf16": [1e-4], "nvfp4": [0.02]}).keys() == {"yaxis"}
    assert "range" not in log_axis({"bf16": [1e-4], "nvfp4": [0.02]})["yaxis"]


@pytest.mark.parametrize("values", [[], [None, None], [0.0, -1.0], [math.nan]])
def test_a_line_without_positive_values_does_not_count(values: list[float]) -> None:
    assert "range" not in log_axis({"none": values, "nvfp4": [0.02]})["yaxis"]
    assert "range" not in log_axis({"none": values})["yaxis"]


@pytest.mark.parametrize(("least", "ticks"), [(0.002, "D2"), (0.015, None), (0.0001, None)])
def test_about_one_decade_has_ticks_at_one_two_and_five(least: float, ticks: str | None) -> None:
    assert log_axis({"nvfp4": [least, 0.02]})["yaxis"].get("dtick") == ticks


def test_one_spike_does_not_put_a_line_below_the_axis() -> None:
    assert "annotations" not in log_axis({"nvfp4": [1.0, 1.0, 1.0], "quads": [1e-4, 0.9, 0.9]})


def test_error_bars_are_distances_cut_at_the_least_value() -> None:
    bars = errors([{"value": 0.5, "low": -0.1, "high": 0.7}, {"value": 0.5, "low": None, "high": None}], "#000000", 0.0)
    assert bars["array"] == pytest.approx([0.2, 0])
    assert bars["arrayminus"] == pytest.approx([0.5, 0])
