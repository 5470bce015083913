"""What the self-contained HTML reports share: one page with plotly.js packed into it once, readable in light and dark.

Figures are plotly JSON and take the page's ink and lines, also when the reader changes between light and dark. Tables
that may be wider than the screen scroll in a region of their own that the keyboard reaches.
"""

from __future__ import annotations

import base64
import gzip
import html
from importlib import resources
from typing import Any

Figure = tuple[str, str, str, str]  # element id, title, note, plotly JSON


def page(title: str, body: str, *, style: str = "") -> str:
    """The document: `body` is markup, `title` text, `style` CSS added to the shared one."""
    own, script = (resources.files("quads").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width">\n<title>{html.escape(title)}</title>'
        f'<style>{own}{style}</style><script type="application/gzip" id="plotly">{_plotly()}</script>'
        f"<script>{script}</script></head><body>\n"
        f"{body}\n</body></html>\n"
    )


def _plotly() -> str:
    """plotly.js, gzipped and in base64: 1.9 instead of 4.6 MB. page.js unpacks it. ImportError without plotly."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


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
