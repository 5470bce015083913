"""report.html as a document; tests/browser looks at what it draws."""

from __future__ import annotations

import json
import re

import pytest

from quads.compare import report
from quads.compare.figures import COLORS, color, figures
from quads.compare.summary import summarize
from tests.quads.comparison import ARMS, SETTINGS, STAMP, comparison

pytest.importorskip("plotly")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    runs, evals = comparison()
    hostile = {**STAMP, "command": "<script>alert(1)</script>"}
    report.write(path, summarize(runs, evals), runs, evals, hostile, SETTINGS)
    return path.read_text()


def test_the_report_loads_nothing_and_holds_plotly_once(page: str) -> None:
    own = re.sub(r'(id="plotly">)[^<]+', r"\1", page, count=1)
    assert len(own) < len(page) - 1_500_000
    assert not re.search(r"(src|href)\s*=\s*['\"]?(https?:)?//", own)
    assert "plotly.js v" not in own and own.count('id="plotly"') == 1


def test_what_users_typed_is_text_and_not_markup(page: str) -> None:
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_every_number_of_the_table_has_its_meaning_in_words(page: str) -> None:
    for label, key, meaning in report._COLUMNS:
        assert f"<dt>{label}</dt>" in page, key
        assert len(meaning.split()) >= 3


def test_the_table_shows_the_summary(page: str) -> None:
    runs, evals = comparison()
    gap = summarize(runs, evals)["arms"]["quads"]["gap/mean"]
    assert f"<td>{gap:.4g}</td>" in page


def test_every_arm_keeps_its_colour_in_every_plot() -> None:
    for _, _, _, spec in figures(*comparison()):
        traces = {trace["name"]: trace for trace in json.loads(spec)["data"]}
        assert traces.keys() == ARMS.keys()
        for arm, trace in traces.items():
            assert (trace.get("line") or trace["marker"])["color"] == color(arm)


def test_named_recipes_have_colours_of_their_own() -> None:
    assert len(set(COLORS.values())) == len(COLORS)
    assert color("mine").startswith("#")


def test_a_curve_is_the_mean_over_seeds() -> None:
    runs, evals = comparison()
    spec = json.loads(next(figures(runs, evals))[3])
    quads = next(trace for trace in spec["data"] if trace["name"] == "quads")
    expected = [r["eval/accuracy"] for r in evals if r["arm"] == "quads" and r["seed"] == 0]
    assert quads["y"] == pytest.approx(expected)  # both seeds were made alike
    assert quads["x"] == [0, 4, 8, 12]
