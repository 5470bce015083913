"""Reports in headless Chromium: open one, see what was drawn, walk through it with the keyboard."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PHONE, DESKTOP = 390, 1200
# Plots of the page: the main layers of their drawings, and the marks in them (lines, points, bars) that have a shape.
_DRAWN = """() => [...document.querySelectorAll(".plot")].map(plot => ({
  id: plot.id, layers: plot.querySelectorAll(".main-svg .cartesianlayer").length, width: plot.clientWidth,
  svg: plot.querySelector(".main-svg")?.clientWidth,
  marks: [...plot.querySelectorAll("path.js-line, .points path")].filter(p => p.getAttribute("d").length > 8).length,
  ink: plot.querySelector(".xtick text") && getComputedStyle(plot.querySelector(".xtick text")).fill,
}))"""


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser for as long as the block lasts."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def opened(browser: Any, path: Path, *, scheme: str = "light", width: int = DESKTOP) -> Any:
    """A page that shows the file, its figures drawn, unless something failed."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(path.as_uri())
    page.wait_for_function("ready || scriptErrors.length")
    return page


def drawn(page: Any) -> dict[str, dict[str, Any]]:
    """What each plot shows, by its id."""
    return {plot["id"]: plot for plot in page.evaluate(_DRAWN)}


def brightness(colour: str) -> int:
    """0 (black) to 765 (white) of a CSS colour such as rgb(27, 31, 36)."""
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3])


def errors(page: Any) -> list[str]:
    """Messages of scripts that failed."""
    return page.evaluate("window.scriptErrors")


def tab_to(page: Any, wanted: str, most: int = 60) -> None:
    """Press Tab until the element that the expression `wanted` says yes to has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate(f"(e => {wanted})(document.activeElement)"):
            return
    raise AssertionError(f"{most} tabs do not reach an element with {wanted}")
