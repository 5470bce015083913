"""report.html in headless Chromium: every plot drew, in light and dark, and no script failed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from quads.compare import report
from quads.compare.figures import figures
from quads.compare.summary import summarize
from tests.browser.pages import brightness
from tests.quads.comparison import ARMS, SETTINGS, STAMP, comparison

pytest.importorskip("plotly")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium); not found")

# What the page looks like from inside, written into its DOM once its figures are drawn, or something failed.
_PROBE = """<script>addEventListener("load", function look() {
  if (!ready && !scriptErrors.length) return setTimeout(look, 50);
  const plots = [...document.querySelectorAll(".plot")].map(plot => ({
    id: plot.id, width: plot.clientWidth,
    marks: plot.querySelectorAll(".scatterlayer .trace, .barlayer .point").length,
    drawn: [...plot.querySelectorAll(".scatterlayer path.js-line, .barlayer .point path")]
      .map(path => path.getAttribute("d").length),
    ink: plot.querySelector(".xtick text, .xaxislayer-above text") &&
      getComputedStyle(plot.querySelector(".xtick text, .xaxislayer-above text")).fill,
  }));
  const wide = document.documentElement.scrollWidth > innerWidth;
  document.body.insertAdjacentHTML("beforeend", "<pre id=probe></pre>");
  const paper = getComputedStyle(document.body).backgroundColor;
  document.getElementById("probe").textContent = JSON.stringify({ plots, wide, paper, errors: window.scriptErrors });
})</script>"""


def _look(tmp_path: Path, *, dark: bool, break_with: str = "") -> dict:
    page = tmp_path / "report.html"
    runs, evals = comparison()
    report.write(page, summarize(runs, evals), runs, evals, STAMP, SETTINGS)
    page.write_text(page.read_text().replace("</body>", f"{break_with}{_PROBE}</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--window-size=1100,900"]
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [str(CHROMIUM), *flags, scheme, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000"]
    dom = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=180, check=True
    )
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom.stdout, re.DOTALL)
    assert found, dom.stderr[-2000:]
    return json.loads(found.group(1).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.mark.parametrize("dark", [False, True])
def test_every_plot_draws_every_arm_and_no_script_fails(tmp_path: Path, dark: bool) -> None:
    seen = _look(tmp_path, dark=dark)
    assert seen["errors"] == []
    assert [plot["id"] for plot in seen["plots"]] == [name for name, *_ in figures(*comparison())]
    for plot in seen["plots"]:
        assert plot["marks"] == len(ARMS), plot
        assert all(length > 20 for length in plot["drawn"]), plot
        assert plot["width"] > 600
    assert not seen["wide"]


def test_ink_and_paper_change_places_in_the_dark(tmp_path: Path) -> None:
    light, dark = _look(tmp_path, dark=False), _look(tmp_path, dark=True)
    assert brightness(light["paper"]) > 600 > 200 > brightness(dark["paper"])
    for bright, dim in zip(dark["plots"], light["plots"], strict=True):
        assert brightness(bright["ink"]) > 600 > 200 > brightness(dim["ink"])


def test_a_failing_script_is_noticed(tmp_path: Path) -> None:
    seen = _look(tmp_path, dark=False, break_with="<script>noSuchFunction()</script>")
    assert any("noSuchFunction" in error for error in seen["errors"])
