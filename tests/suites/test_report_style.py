"""Colours of arms."""

from __future__ import annotations

import itertools

import pytest

from quads import recipes
from quads.suites.config import CONTROLS
from quads.suites.report_style import SCOPES, TERMS, Look, faint


def contrast(colour: str, page: str) -> float:
    """WCAG contrast ratio of two #rrggbb colours."""
    bright, dim = sorted((_luminance(colour), _luminance(page)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


CHANGED = [f"quads:rac_ratio=0.{n}" for n in range(10)]
COLOURS = Look([*CONTROLS, *recipes.named(), *CHANGED]).colors


@pytest.mark.parametrize("page", ["#ffffff", "#14181d"])
def test_every_colour_is_legible_on_white_and_on_black(page: str) -> None:
    drawn = {**COLOURS, **{name: look[1] for name, look in (SCOPES | TERMS).items()}}
    assert {name for name, colour in drawn.items() if contrast(colour, page) < 3} == set()


def test_no_two_arms_of_a_suite_share_a_colour() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_neighbouring_arms_differ_in_dash_or_marker_too() -> None:
    look = Look(recipes.named())
    looks = [(look.line(arm)["dash"], look.marker(arm)["symbol"]) for arm in recipes.named()]
    assert all(a != b for a, b in itertools.pairwise(looks))


def test_every_scope_of_a_recipe_has_a_name_in_the_ratio_curve() -> None:
    assert SCOPES.keys() == {*recipes._CHOICES["rac_scope"]} - {"all"}


def test_a_band_is_its_line_seen_through() -> None:
    assert faint("#10ff00", 0.2) == "rgba(16,255,0,0.2)"
