"""The evidence table says what the numbers say, and the published one is made of the published files."""

import json
from pathlib import Path

import pytest

from quads.attribution import evidence

PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "attribution"


def document(low: float, high: float) -> dict:
    gap = {"variant": "both", "mean": 0.5, "low": 0.4, "high": 0.6, "p99": 1.0, "max": 2.0}
    paired = {"variant": "rac-50", "minus": "random-50-s0", "mean": (low + high) / 2, "low": low, "high": high}
    return {
        **{"title": "tiny", "case": "tiny", "tokens": 8, "prompts": 2, "weights": 1},
        "gaps": [{**gap, "against": "reference"}, {**gap, "against": "weights", "mean": 0.3}],
        "errors": [{"variant": "both", "against": "reference", "mean": 0.1, "low": 0.09, "high": 0.11}],
        "paired": [paired],
    }


@pytest.mark.parametrize(("low", "high", "verdict"), [(-2, -1, "better"), (1, 2, "worse"), (-1, 1, "undecided")])
def test_a_verdict_needs_an_interval_that_excludes_zero(low: float, high: float, verdict: str) -> None:
    assert f"), {verdict}\n" in evidence.table([document(low, high)])


def test_a_row_holds_both_gaps_and_an_absent_error_is_empty() -> None:
    row = "| both | 0.5000 (0.4000–0.6000) | 1.000 | 2.000 | 0.3000 (0.4000–0.6000) | 10.00 % (9.00–11.00) |  |"
    assert row in evidence.table([document(0, 1)])


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs the published results of a checkout")
def test_the_published_table_is_made_of_the_published_cases() -> None:
    documents = [json.loads((PUBLISHED / f"{name}.json").read_text("utf-8")) for name in evidence.CASES]
    assert (PUBLISHED / "table.md").read_text("utf-8") == evidence.table(documents)
    assert all(doc["label"] == "emulated (CPU)" and "Q4_1" in doc["note"] for doc in documents)
