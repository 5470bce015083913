"""The suite report in headless Chromium: every plot draws, the keyboard reaches what it must, no script fails."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quads.suites import report
from tests.browser.pages import CHROMIUM, DESKTOP, PHONE, brightness, drawn, errors, opened, tab_to
from tests.suites.made_suite import ARMS, made_suite, write_suite

pytest.importorskip("plotly")
pytest.importorskip("playwright", reason="needs playwright (python -m pip install playwright)")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium); not found")

FIGURES = (
    *("accuracy-end", "accuracy", "gap-mean", "gap-p99", "gap-max", "reward", "throughput"),
    *("ratio", "sweep-8", "sweep-32", "layers"),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(write_suite(tmp_path_factory.mktemp("suite"), made_suite()))


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_plot_draws_and_no_script_fails(browser: Any, path: Path, scheme: str, width: int) -> None:
    page = opened(browser, path, scheme=scheme, width=width)
    plots = drawn(page)
    assert tuple(plots) == FIGURES
    for plot in plots.values():
        assert plot["layers"] == 1, plot
        assert plot["marks"] >= 3, plot
        assert plot["width"] > 300, plot
        assert plot["svg"] == plot["width"], plot
    assert errors(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width  # wide tables scroll inside


def test_ink_and_paper_change_places_in_the_dark(browser: Any, path: Path) -> None:
    page = opened(browser, path)
    paper = "getComputedStyle(document.body).backgroundColor"
    light = (page.evaluate(paper), drawn(page))
    page.emulate_media(color_scheme="dark")  # as a reader's machine does at dusk: without loading again
    page.wait_for_function("getComputedStyle(document.querySelector('.xtick text')).fill != 'rgb(27, 31, 36)'")
    dark = (page.evaluate(paper), drawn(page))
    assert brightness(light[0]) > 600 > 200 > brightness(dark[0])
    for name in FIGURES:
        assert brightness(dark[1][name]["ink"]) > 600 > 200 > brightness(light[1][name]["ink"])


def test_the_keyboard_reaches_the_cell_and_chooses_another(browser: Any, path: Path) -> None:
    page = opened(browser, path)
    shown = "[...document.querySelectorAll('[data-only]')].filter(p => !p.hidden).map(p => p.dataset.only)"
    tab_to(page, "e.dataset.choice === 'cell'")
    assert '{"cell": "plain"}' in page.evaluate(shown)
    page.keyboard.press("ArrowDown")
    assert page.evaluate("choices.cell") == "stress"
    assert '{"cell": "stress"}' in page.evaluate(shown)
    assert '{"cell": "plain"}' not in page.evaluate(shown)
    assert {plot["layers"] for plot in drawn(page).values()} == {1}


def test_the_keyboard_hides_an_arm_in_every_figure(browser: Any, path: Path) -> None:
    page = opened(browser, path)
    before = drawn(page)
    tab_to(page, "e.dataset.series === 'nvfp4'")
    page.keyboard.press("Space")
    after = drawn(page)
    for name in ("accuracy", "gap-mean", "throughput", "sweep-8"):
        assert after[name]["marks"] < before[name]["marks"], name
    assert after["layers"]["marks"] == before["layers"]["marks"]  # has no arms
    boxes = page.evaluate("[...document.querySelectorAll('[data-series=nvfp4]')].map(box => box.checked)")
    assert boxes == [False, False]


def test_what_was_not_measured_for_a_choice_says_so_and_comes_back(browser: Any, tmp_path: Path) -> None:
    summary = made_suite()
    summary["probe"] = [row for row in summary["probe"] if row["reference"] == "w4" or row["arm"] == "engine"]
    page = opened(browser, report.write(write_suite(tmp_path, summary)))
    page.select_option("[data-choice=reference]", "bf16")
    assert page.text_content("#ratio") == "Not measured for this choice."
    page.select_option("[data-choice=reference]", "w4")
    assert drawn(page)["ratio"]["marks"] >= 3
    assert errors(page) == []


def test_paper_is_white_and_figures_fit_on_it(browser: Any, path: Path, tmp_path: Path) -> None:
    page = opened(browser, path, scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("Math.max(...[...document.querySelectorAll('.main-svg')].map(s => s.clientWidth))") <= 700
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert len(page.pdf(path=tmp_path / "report.pdf")) > 50_000
    assert errors(page) == []


@pytest.mark.parametrize(
    ("made", "figures"),
    [({"cells": (), "probed": ()}, 0), ({"cells": ()}, 4), ({"cells": ("plain",), "probed": ()}, 7)],
    ids=["nothing", "probe alone", "one cell alone"],
)
def test_a_suite_with_parts_missing_draws_the_rest(
    browser: Any, tmp_path: Path, made: dict[str, Any], figures: int
) -> None:
    page = opened(browser, report.write(write_suite(tmp_path, made_suite(**made))))
    plots = drawn(page).values()
    assert len(plots) == figures
    assert all(plot["layers"] == 1 and plot["marks"] >= 3 and plot["svg"] == plot["width"] for plot in plots)
    assert errors(page) == []


def test_fourteen_cells_are_as_long_a_page_as_one_but_for_their_rows(browser: Any, tmp_path: Path) -> None:
    heights = []
    for count in (2, 14):
        summary = made_suite(cells=tuple(f"cell{n}" for n in range(count)), arms=tuple(ARMS), probed=())
        page = opened(browser, report.write(write_suite(tmp_path / str(count), summary)))
        assert len(drawn(page)) == 7
        heights.append(page.evaluate("document.documentElement.scrollHeight"))
    assert heights[1] < heights[0] + 12 * 200


def test_a_planted_error_is_noticed(browser: Any, path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(path.read_text().replace("</main>", "<script>noSuchFunction()</script></main>"))
    assert any("noSuchFunction" in error for error in errors(opened(browser, broken)))


def test_a_figure_that_does_not_draw_is_noticed(browser: Any, path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(path.read_text().replace('drawChosen("reward"', 'void ("reward"'))
    assert drawn(opened(browser, broken))["reward"]["layers"] == 0


@pytest.mark.parametrize(
    "breaking",
    [
        lambda packed: packed[: len(packed) // 8 * 4],  # cut short
        lambda packed: packed[:4000] + "?" + packed[4001:],  # no base64
        lambda packed: base64.b64encode(gzip.compress(b"const other = 1")).decode(),  # whole, but not plotly.js
    ],
)
def test_broken_plotly_is_noticed(browser: Any, path: Path, tmp_path: Path, breaking: Callable[[str], str]) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(re.sub(r'(?<=id="plotly">)[^<]+', lambda found: breaking(found.group()), path.read_text()))
    page = opened(browser, broken)
    assert errors(page)
    assert not any(plot["layers"] for plot in drawn(page).values())


def test_a_browser_that_cannot_unpack_says_so_and_keeps_the_rest(browser: Any, path: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.html"
    old.write_text(path.read_text().replace("<head>", "<head><script>delete window.DecompressionStream</script>"))
    page = browser.new_page()
    page.goto(old.as_uri())
    page.evaluate("[choose('cell', 'stress'), tick('nvfp4', false), onPaper(true)]")
    assert page.evaluate("[...document.querySelectorAll('.plot')].every(p => p.textContent.startsWith('This browser'))")
    assert page.evaluate("choices.cell") == "stress"
    assert errors(page) == []


def test_what_a_reader_does_before_plotly_is_there_is_kept(browser: Any, path: Path, tmp_path: Path) -> None:
    early = tmp_path / "early.html"
    hasty = "<script>choose('cell', 'stress'); tick('nvfp4', false); onPaper(true); onPaper(false)</script>"
    early.write_text(path.read_text().replace("</body>", f"{hasty}</body>"))
    page = opened(browser, early)
    assert page.evaluate("choices.cell") == "stress"
    assert page.evaluate("document.getElementById('reward').data.find(t => t.legendgroup === 'nvfp4').visible") is False
    assert {plot["layers"] for plot in drawn(page).values()} == {1}
    assert errors(page) == []
