"""What the self-contained HTML reports share: one page with plotly.js inlined once, readable in light and dark.

Figures are plotly JSON and take the page's ink and lines, also when the reader changes between light and dark. Tables
that may be wider than the screen scroll in a region of their own that the keyboard reaches.
"""

from __future__ import annotations

import html
from typing import Any

Figure = tuple[str, str, str, str]  # element id, title, note, plotly JSON


def page(title: str, body: str, *, style: str = "") -> str:
    """The document: `body` is markup, `title` text, `style` CSS added to the shared one."""
    from plotly.offline import get_plotlyjs

    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width">\n<title>{html.escape(title)}</title>'
        f"<style>{_STYLE}{style}</style><script>{get_plotlyjs()}</script><script>{_SCRIPT}</script></head><body>\n"
        f"{body}\n</body></html>\n"
    )


def plot(figure: Figure, after: str = "") -> str:
    """A section that draws one figure, then holds the markup `after`."""
    name, title, note, spec = figure
    inline = spec.replace("</", "<\\/")
    return (
        f'<section><h2 id="{name}-title">{html.escape(title)}</h2><p>{html.escape(note)}</p>'
        f'<div class="plot" id="{name}" role="img" aria-labelledby="{name}-title"></div>'
        f'<script>draw("{name}", {inline})</script>{after}</section>'
    )


def wide(markup: str, label: str) -> str:
    """A region that scrolls sideways, by keyboard too; `label` is text."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{html.escape(label)}">{markup}</div>'


def flat(document: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested keys joined by dots; lists joined by commas."""
    found: dict[str, str] = {}
    for key, value in document.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return found


def pairs(named: dict[str, str]) -> str:
    """Names and values in one band."""
    spans = (f"<span><b>{html.escape(key)}</b> {html.escape(value)}</span>" for key, value in named.items())
    return f'<div class="stamp">{"".join(spans)}</div>'


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #5a6470; --paper: #fff; --line: #d5dae0; --band: #f4f6f8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --dim: #9aa5b1; --paper: #14181d; --line: #333b45; --band: #1c2229 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1080px;
  margin: 0 auto; padding: 24px }
h1 { margin: 0 0 4px } h2 { margin: 32px 0 0; font-size: 18px } p { margin: 4px 0 8px; color: var(--dim) }
a { color: inherit } :focus-visible { outline: 2px solid #4c78a8; outline-offset: 2px }
.verdict { color: var(--ink); font-weight: 600 }
.stamp { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 12px; color: var(--dim); background: var(--band);
  padding: 8px 12px; border-radius: 6px; margin: 8px 0; overflow-wrap: anywhere }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100% }
td, th { padding: 4px 10px; border-bottom: 1px solid var(--line); text-align: right;
  font-variant-numeric: tabular-nums }
tbody th { text-align: left; font-weight: 500 } small { color: var(--dim) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; font-size: 13px }
dd { margin: 0; color: var(--dim) }
.plot { height: 380px }
"""

_SCRIPT = """
window.scriptErrors = []; window.addEventListener("error", e => window.scriptErrors.push(e.message));
const drawn = [];
function look() {
  const css = getComputedStyle(document.documentElement), ink = css.getPropertyValue("--ink").trim();
  const line = css.getPropertyValue("--line").trim();
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line };
  return { font: { color: ink }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", axis };
}
function draw(id, spec) {
  const { axis, ...theme } = look(), layout = { ...spec.layout, ...theme };
  for (const key of Object.keys(layout)) if (/^[xy]axis/.test(key)) layout[key] = { ...axis, ...layout[key] };
  drawn.push([id, spec]);
  Plotly.react(id, spec.data, layout, { responsive: true, displayModeBar: false });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.splice(0).forEach(p => draw(...p)));
"""
