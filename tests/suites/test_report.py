"""The suite report as a document; tests/browser looks at what it draws."""

from __future__ import annotations

import dataclasses
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from quads.suites import report
from quads.suites import summary as summaries
from quads.suites.outcomes import Curve, Estimate, Learned, Outcome, Points
from quads.suites.report import ReportError
from quads.suites.report_paper import claims
from quads.suites.report_tables import by_place, outcomes, overviews, versus
from tests.suites import made_results
from tests.suites.made_suite import STAMP, SUITE, made_suite, write_suite

pytest.importorskip("plotly")


def own(page: str) -> str:
    """The page without plotly.js."""
    return re.sub(r'(id="plotly">)[^<]+', r"\1", page, count=1)


def text(page: str) -> str:
    """What a reader sees."""
    markup = re.compile(r"<script.*?</script>|<style.*?</style>|<[^>]+>", flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(markup.sub(" ", own(page))))


@pytest.fixture(scope="module")
def page() -> str:
    return report.html(made_suite(), STAMP)


def test_the_made_up_summary_has_the_fields_that_summaries_have() -> None:
    made = made_suite()
    pairs: dict[Any, dict[str, Any]] = {
        summaries.Summary: made,
        Outcome: made["outcomes"][0],
        Curve: made["curves"][0],
        Points: made["curves"][0]["accuracy"],
        Learned: made["learned"][0],
        Estimate: made["learned"][0]["gain"],
        summaries.Comparison: made["comparisons"][0],
        summaries.ProbeComparison: made["probe_comparisons"][0],
        summaries.Probed: made["probe"][0],
        summaries.Verdict: made["hypotheses"][0],
    }
    for kind, entry in pairs.items():
        assert {field.name for field in dataclasses.fields(kind)} == entry.keys(), kind


def test_a_folder_of_results_becomes_a_report(tmp_path: Path) -> None:
    made_results.write(tmp_path)
    summaries.write(tmp_path)
    assert report.write(tmp_path) == tmp_path / "report.html"
    assert "emulated (CPU)" in text((tmp_path / "report.html").read_text())


def test_the_report_loads_nothing_and_holds_plotly_once(page: str) -> None:
    assert len(own(page)) < len(page) - 1_500_000
    assert not re.search(r"(src|href)\s*=\s*['\"]?(https?:)?//", own(page))
    assert "plotly.js v" not in own(page) and own(page).count('id="plotly"') == 1


def test_refuted_and_undecided_claims_are_as_large_as_supported_ones_and_stand_before_every_figure(page: str) -> None:
    before = page[: page.index('<div class="plot"')]
    cards = re.findall(r'<li class="card (\w+)" id="claim-h\d">.*?<h3>(.*?)</h3>', before, flags=re.DOTALL)
    claims = [(entry["verdict"], entry["claim"].replace("'", "&#39;")) for entry in made_suite()["hypotheses"]]
    assert cards == claims
    assert "4 hypotheses: 1 supported, 1 refuted, 2 undecided" in text(page)


def test_settings_and_stamp_are_shown(page: str) -> None:
    assert "lr 0.0001" in text(page)
    assert "git.sha 0123456789abcdef" in text(page)


def test_what_sets_a_cell_apart_and_what_was_expected_of_it_stand_beside_its_figures() -> None:
    page = text(report.html(made_suite(cells=("plain", "stress+tis")), STAMP, SUITE))
    assert "plain : Expected: every arm learns." in page
    assert "stress+tis : lr = 0.0003; corrections: tis." in page
    assert "Settings of every cell: task chain_sum, start model ci, 60 steps, 64 prompts a step" in page
    assert "learning rate" not in page.partition("Settings of every cell")[2].partition("Held-out")[0]  # a variant's


def test_a_verdict_stands_beside_its_interval_detectable_difference_pairs_and_reason(page: str) -> None:
    assert "−0.010 (−0.035 to +0.015) · 8 pairs · detectable 0.0350 · margin 0.0200" in text(page)
    assert "the interval says undecided" in text(page)


def test_a_cell_in_which_bf16_did_not_learn_says_so() -> None:
    page = report.html(made_suite(cells=("plain", "broken")), STAMP)
    assert "this cell says nothing about accuracy" in text(page)
    assert 'class="learned no"' in page


def test_what_users_typed_is_text_and_not_markup() -> None:
    summary = made_suite(cells=("</script><script>alert(1)</script>",))
    summary |= {"title": "<script>alert(1)</script>", "noted": ["<script>alert(1)</script>"]}
    page = report.html(summary, {**STAMP, "command": "<script>alert(1)</script>"})
    assert "<script>alert(1)" not in page


@pytest.mark.parametrize(
    "made",
    [{"cells": (), "probed": ()}, {"cells": ()}, {"cells": ("plain",), "probed": ()}, {"outliers": ("",)}],
    ids=["nothing measured", "probe alone", "one cell, no probe", "no outliers"],
)
def test_a_suite_may_lack_parts(made: dict[str, Any]) -> None:
    page = report.html(made_suite(**made), {})
    assert ('id="outcomes"' in page) == bool(made.get("cells", True))
    assert ('id="probe"' in page) == bool(made.get("probed", True))


def test_numbers_that_are_not_known_are_dashes() -> None:
    def forget(entry: Any) -> Any:
        if isinstance(entry, dict):
            return {key: forget(value) for key, value in entry.items()}
        if isinstance(entry, list):
            return [forget(value) for value in entry]
        return None if isinstance(entry, float) else entry

    page = report.html(forget(made_suite()), STAMP)
    assert "None" not in text(page).partition("Settings")[0]
    assert "nan" not in text(page)


def test_every_command_that_wrote_the_results_is_listed_oldest_first(page: str) -> None:
    first, second = STAMP["earlier"][0]["command"], STAMP["command"]
    assert f"{first} {second}" in text(page)


def test_many_hypotheses_have_an_index_with_every_claim_under_its_verdict() -> None:
    summary = made_suite()
    summary["hypotheses"] = [{**summary["hypotheses"][i % 3], "id": f"h{i}"} for i in range(9)]
    index = own(report.html(summary, STAMP)).partition('class="index"')[2].partition('<ul class="cards">')[0]
    for number, verdict in enumerate(("supported", "refuted", "undecided")):
        part = index.partition(f'<div class="{verdict}">')[2].partition("</div>")[0]
        assert re.findall(r'href="#claim-h(\d)"', part) == [str(number + 3 * i) for i in range(3)]


def test_a_comparison_of_two_places_or_with_several_rivals_says_which() -> None:
    row = {"arm": "quads", "against": "nvfp4 + qat", "where": "plain"}
    assert versus(row) == "quads − mean of nvfp4, qat"
    assert versus({**row, "against": "quads", "where": "a : b"}) == "quads in a − quads in b"


def test_comparisons_of_the_probe_follow_its_selectors_and_those_of_two_places_always_show() -> None:
    places = ("start/w4", "start/8x16/w4", "start/8x16/w4", "start/w4 : start/8x16/w4")
    plain, outliers, both = by_place([{"where": where} for where in places])
    assert plain == ({"policy": "start", "outliers": "", "reference": "w4"}, [{"where": places[0]}])
    assert outliers == ({"policy": "start", "outliers": "8x16", "reference": "w4"}, [{"where": places[1]}] * 2)
    assert both == (None, [{"where": places[3]}])


def test_an_accuracy_from_before_training_is_not_shown_as_one_after_it() -> None:
    summary = made_suite(cells=("plain", "stress"), arms=("bf16", "quads"))
    points = summary["curves"][0]["accuracy"]
    summary["curves"][0]["accuracy"] = {key: values[:1] for key, values in points.items()}
    summary["curves"][1]["accuracy"] = {key: values[:3] for key, values in summary["curves"][1]["accuracy"].items()}
    (_, accuracy), *_ = overviews(summary)
    assert accuracy.rows[0] == ("plain", "–", "0.951 (0.941–0.961, step 20)")
    assert accuracy.rows[1] == ("stress", "0.950 (0.940–0.960)", "0.951 (0.941–0.961)")
    assert ("accuracy of step", "0", "20") in outcomes(summary, "plain").rows
    assert [row[0] for claim in claims(summary, "plain") if "accuracy after" in claim.what for row in claim.rows] == [
        "quads"
    ]


def test_a_collapse_is_listed_with_its_step_and_its_rule(page: str) -> None:
    assert "stress nvfp4 2 41 reward 0.2 below its best, 10 steps in a row" in text(page)


def test_every_arm_is_explained_in_words(page: str) -> None:
    shown = text(page)
    for words in ("the paper's method", "control: the same precision", "as quads, with rac_ratio = 0.25"):
        assert words in shown


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 2, "hypotheses": []}'])
def test_a_summary_that_is_none_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(ReportError, match=r"summary\.json"):
        report.write(tmp_path)


def test_a_folder_without_results_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"summary\.json cannot be read"):
        report.write(tmp_path)


def test_a_report_needs_no_stamp(tmp_path: Path) -> None:
    write_suite(tmp_path, made_suite(cells=("plain",), probed=()), stamp=None)
    assert report.write(tmp_path).exists()
