"""How numbers are written."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quads.suites.report_numbers import as_ratio, interval, number


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((0.0194, "0.0194"), (18_496.2, "18,496"), (2.86e-7, "2.86e-07"), (0.0, "0"), (8, "8"), (800_000, "800,000")),
        *((-0.5, "−0.500"), (1e-3, "0.00100"), (None, "–"), (math.nan, "–"), (math.inf, "–")),
    ],
)
def test_a_number_has_three_significant_digits(value: Any, expected: str) -> None:
    assert number(value) == expected


@pytest.mark.parametrize(
    ("share", "signed", "expected"),
    [
        ((0.951, 0.930, 0.967), False, "0.951 (0.930–0.967)"),
        ((0.002, -0.004, 0.0081), True, "+0.002 (−0.004 to +0.008)"),
        ((-0.0061, -0.007, -0.005), True, "−0.0061 (−0.0070 to −0.0050)"),
        ((0.01, -0.02, 0.04), False, "0.010 (−0.020 to 0.040)"),
        ((2.0e-5, 1.5e-5, 2.5e-5), False, "2.0e-05 (1.5e-05–2.5e-05)"),
        ((2.0e-5, 0.0, 4.0e-5), False, "2.0e-05 (0–4.0e-05)"),
        ((1.0, 1.0, 1.0), False, "1.000 (1.000–1.000)"),
        ((0.0, 0.0, 0.0), False, "0.000 (0.000–0.000)"),
        ((0.5, None, None), False, "0.500"),
        ((0.5, math.nan, 0.6), False, "0.500"),
        ((None, None, None), False, "–"),
    ],
)
def test_an_interval_shows_as_many_digits_as_its_width_justifies(share: Any, signed: bool, expected: str) -> None:
    assert interval(dict(zip(("value", "low", "high"), share, strict=True)), signed=signed) == expected


def test_no_interval_is_a_dash() -> None:
    assert interval(None) == "–"


def test_the_difference_of_a_logarithm_is_also_a_ratio() -> None:
    entry = {"metric": "probe/log_gap_mean", "difference": math.log(0.7), "low": math.log(0.6), "high": math.log(0.8)}
    assert as_ratio(entry) == "0.70 times (0.60–0.80)"
    assert as_ratio({**entry, "metric": "probe/gap_mean"}) == ""
    assert as_ratio({**entry, "difference": None}) == ""
