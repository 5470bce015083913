"""The small drawing of a verdict."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quads.suites.report_interval import drawing


def entry(low: float | None, high: float | None, direction: str = "lower", margin: float = 0.0) -> dict[str, Any]:
    middle = None if low is None or high is None else (low + high) / 2
    return {"difference": middle, "low": low, "high": high, "direction": direction, "margin": margin, "verdict": "v"}


def shapes(svg: str) -> tuple[float, float, float, float]:
    """Left and right of the shaded claim and of the interval."""
    x, width = map(float, re.search(r'class="claim" x="([\d.]+)" y="2" width="([\d.]+)"', svg).groups())  # type: ignore[union-attr]
    low, high = map(float, re.search(r'class="bar" x1="([\d.]+)" x2="([\d.]+)"', svg).groups())  # type: ignore[union-attr]
    return x, x + width, low, high


@pytest.mark.parametrize(
    ("low", "high", "direction", "margin", "inside"),
    [
        (-2.0, -1.0, "lower", 0.0, True),
        (-2.0, -0.5, "lower", 1.0, False),
        (1.0, 2.0, "lower", 0.0, False),
        (1.0, 2.0, "higher", 0.5, True),
        (-1.0, 2.0, "higher", 0.0, False),
        (-0.01, 0.01, "equal", 0.02, True),
        (-0.03, 0.01, "equal", 0.02, False),
    ],
)
def test_the_interval_lies_in_the_shade_exactly_where_the_claim_holds(
    low: float, high: float, direction: str, margin: float, inside: bool
) -> None:
    left, right, start, end = shapes(drawing(entry(low, high, direction, margin)))
    assert (left <= start and end <= right) == inside


def test_an_interval_without_width_is_still_drawn() -> None:
    assert "<circle" in drawing(entry(0.0, 0.0))


def test_nothing_is_drawn_of_what_was_not_measured() -> None:
    assert drawing(entry(None, None)) == ""
