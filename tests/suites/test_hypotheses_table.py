"""docs/suites-hypotheses.md maps every hypothesis of every shipped suite to a claim, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quads.suites import config, metrics

PAGE = Path(__file__).parents[2] / "docs" / "suites-hypotheses.md"
SUITES = Path(__file__).parents[2] / "suites"
VARIANTS = {"-outliers", "-8x16", "-32x8"}  # endings that a cell names once for all ids before it


def mapped() -> set[tuple[str, str]]:
    """(suite, hypothesis) of the second column of the tables; "each `-x`" stands for the ids before it."""
    found = set()
    for row in PAGE.read_text("utf-8").splitlines():
        cells = row.split(" | ")
        for part in cells[1].split("; ") if len(cells) == 3 and "`" in cells[1] else ():
            suite, _, names = part.rpartition(": ")
            ids = re.findall(r"`([^`]+)`", names)
            plain = [name for name in ids if name not in VARIANTS]
            each = [name for name in ids if name in VARIANTS]
            found |= {(suite, name + ending) for name in plain for ending in ("", *each)}
    return found


def test_the_page_maps_exactly_the_shipped_hypotheses() -> None:
    shipped = {(name, h.id) for name in config.shipped() for h in config.load(name).hypotheses}
    assert mapped() == shipped


@pytest.mark.parametrize("name", config.shipped())
def test_every_hypothesis_names_a_known_metric(name: str) -> None:
    for hypothesis in config.load(name).hypotheses:
        metrics.check(hypothesis.metric)


@pytest.mark.parametrize("name", config.shipped())
def test_ids_are_unique_and_every_suite_explains_itself(name: str) -> None:
    ids = [hypothesis.id for hypothesis in config.load(name).hypotheses]
    assert len(set(ids)) == len(ids)
    readme = (SUITES / name / "README.md").read_text("utf-8")
    headings = [line.removeprefix("## ") for line in readme.splitlines() if line.startswith("## ")]
    assert headings[0].startswith("Hypotheses")  # before arms, model and budget
