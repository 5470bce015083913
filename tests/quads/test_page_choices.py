"""Selectors and figures as markup; tests/browser uses them with a keyboard."""

from __future__ import annotations

import json
import re

import plotly.graph_objects as go
import pytest

from quads.page_choices import ChosenFigure, inline, plot, selector, tick_boxes

LINE = {"data": [{"type": "scatter", "x": [1, 2], "y": [3.0, 4.0]}], "layout": {"xaxis": {"title": {"text": "step"}}}}


def test_a_figure_carries_the_plotly_document_of_every_choice() -> None:
    markup = plot(ChosenFigure(name="gap", title="Gap", note="n", specs={"a|x": LINE, "b|x": LINE}, by=("cell", "how")))
    name, specs, by = json.loads("[" + re.search(r"drawChosen\((.*)\)</script>", markup)[1] + "]")
    assert (name, by, specs.keys()) == ("gap", ["cell", "how"], {"a|x", "b|x"})
    go.Figure(specs["b|x"])  # plotly raises ValueError on what it does not know


def test_what_users_typed_is_text_and_not_markup() -> None:
    hostile = "</script><script>alert(1)</script>"
    figure = ChosenFigure(name="x", title=hostile, note=hostile, specs={hostile: LINE}, by=("cell",))
    choice = selector("cell", hostile, [(hostile, hostile), ("other", hostile)])
    for markup in (plot(figure), choice, tick_boxes(hostile, {hostile: "red"})):
        assert "<script>alert" not in markup
        assert markup.count("</script>") == markup.count("<script>")


def test_a_single_choice_is_made_without_a_selector() -> None:
    assert selector("cell", "Cell", [("plain", "plain")]) == '<script>set("cell", "plain")</script>'


def test_a_page_without_anything_to_choose_has_no_selector() -> None:
    assert selector("cell", "cell", []) == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_lacks_become_gaps_of_the_curve(value: float) -> None:
    assert json.loads(inline({"y": [1.0, (value, 0.123456789)]})) == {"y": [1.0, [None, 0.123457]]}
