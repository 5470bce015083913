"""The benchmark's report in headless Chromium: every plot draws, the keyboard reaches what it must, no script fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quads.bench.report import write_report
from tests.bench.bench_run import results, write_run
from tests.browser.pages import CHROMIUM, DESKTOP, PHONE, brightness, drawn, errors, opened, tab_to

pytest.importorskip("plotly")
pytest.importorskip("playwright", reason="needs playwright (python -m pip install playwright)")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium); not found")

FIGURES = (
    "bars",
    "roofline",
    "scaling",
    "energy",
    "checked",
    "chips",
    "against-fp8",
    "rollouts",
    "over-ratio",
    "roofs",
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("run"), results(), chips=("H200", "B200")))


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_plot_draws_and_no_script_fails(browser: Any, path: Path, scheme: str, width: int) -> None:
    page = opened(browser, path, scheme=scheme, width=width)
    plots = drawn(page)
    assert tuple(plots) == FIGURES
    for plot in plots.values():
        assert plot["layers"] == 1, plot
        assert plot["marks"] >= 2, plot
        assert plot["width"] > 300, plot
    assert errors(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width  # wide tables scroll inside


def test_ink_and_paper_change_places_in_the_dark(browser: Any, path: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light, dark = (opened(browser, path, scheme=scheme) for scheme in ("light", "dark"))
    assert brightness(light.evaluate(paper)) > 600 > 200 > brightness(dark.evaluate(paper))
    for name in FIGURES:
        assert brightness(drawn(dark)[name]["ink"]) > 600 > 200 > brightness(drawn(light)[name]["ink"])


def test_the_keyboard_chooses_another_chip(browser: Any, path: Path) -> None:
    page = opened(browser, path)
    tab_to(page, "e.dataset.choice === 'chip'")
    before = page.evaluate("document.getElementById('against-fp8').data.map(t => t.y)")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("choices.chip") == "B200"
    assert page.evaluate("document.getElementById('against-fp8').data.map(t => t.y)") != before
    assert errors(page) == []


def test_the_keyboard_opens_what_is_folded(browser: Any, path: Path) -> None:
    page = opened(browser, path)
    tab_to(page, "e.tagName === 'SUMMARY' && e.textContent.startsWith('Goals')")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.parentElement.open")


def test_the_keyboard_hides_one_numerics_in_every_figure(browser: Any, path: Path) -> None:
    page = opened(browser, path)
    before = drawn(page)
    tab_to(page, "e.dataset.series === 'nvfp4'")
    page.keyboard.press("Space")
    after = drawn(page)
    for name in ("bars", "roofline", "scaling", "energy", "checked", "chips", "rollouts"):
        assert after[name]["marks"] < before[name]["marks"], name


@pytest.mark.parametrize(
    ("name", "figure"), [("group", "bars"), ("scaling", "scaling"), ("energy", "energy"), ("modelled", "chips")]
)
def test_every_choice_of_a_selector_draws(browser: Any, path: Path, name: str, figure: str) -> None:
    page = opened(browser, path)
    marks = page.evaluate(
        """([name, figure]) => [...document.querySelector(`select[data-choice=${name}]`).options].map(option => {
          choose(name, option.value);
          return document.getElementById(figure).querySelectorAll("path.js-line, .points path").length;
        })""",
        [name, figure],
    )
    assert len(marks) > 1 and min(marks) >= 1
    assert errors(page) == []


def test_a_planted_error_is_noticed(browser: Any, path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(path.read_text().replace("</body>", "<script>noSuchFunction()</script></body>"))
    assert any("noSuchFunction" in error for error in errors(opened(browser, broken)))


def test_a_figure_that_does_not_draw_is_noticed(browser: Any, path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(path.read_text().replace('drawChosen("roofline"', 'void ("roofline"'))
    assert drawn(opened(browser, broken))["roofline"]["layers"] == 0
