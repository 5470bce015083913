"""report.html of a comparison: one self-contained file, plotly.js inlined once, readable in light and dark."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from quads.compare import table
from quads.compare.figures import figures
from quads.compare.records import Record, write_atomically
from quads.compare.summary import Numbers, learned

_COLUMNS = (
    (
        "accuracy start",
        "accuracy/start",
        "share of held-out problems solved greedily before training, under this arm's rollout numerics",
    ),
    ("accuracy end", "accuracy/end", "the same after the last step, with its 95 % bootstrap interval over problems"),
    ("gain", "accuracy/gain", "end minus start, problem by problem (paired bootstrap)"),
    ("end against bf16", "accuracy/against_bf16", "end minus bf16's end, problem by problem (paired bootstrap)"),
    (
        "mean |Δ|",
        "gap/mean",
        "|log p trainer − log p rollout| of the sampled tokens, before the step's update: mean over all tokens",
    ),
    ("mean |Δ| first", "gap/mean_first", "the same over the first 5 steps"),
    (
        "mean |Δ| last",
        "gap/mean_last",
        "the same over the last 5 steps: growth means that the two policies drift apart",
    ),
    ("p99", "gap/p99", "99th percentile within a step, median over steps"),
    (
        "max",
        "gap/max",
        "largest single token of the run; grows with the number of tokens, so compare it with the token count only",
    ),
    ("k3", "gap/k3", "KL(rollout ‖ trainer), Schulman's k3 estimate"),
    ("k3 reverse", "gap/k3_reverse", "the same estimate with the roles exchanged"),
    (
        "ESS",
        "gap/ess",
        "effective share of the samples if importance weights corrected the gap (they do not here); 1 is no gap",
    ),
    ("tokens", "gap/tokens", "sampled tokens that the gap's statistics rest on"),
    ("reward, last", "reward/last", "mean reward of the last 5 steps"),
    ("rollout tokens/s", "throughput/rollout_tokens_per_s", f"median; {table.SPEED_NOTE}"),
)


def write(
    path: Path, summary: Numbers, runs: list[Record], evals: list[Record], stamp: dict[str, Any], config: dict[str, Any]
) -> None:
    """Write the report of a comparison."""
    from plotly.offline import get_plotlyjs

    plots = "".join(_plot(*figure) for figure in figures(runs, evals))
    body = _PAGE.format(
        style=_STYLE,
        verdict=html.escape(table.verdict(learned(summary))),
        stamp=_pairs(_flat({**stamp, "earlier": f"{len(stamp.get('earlier', []))} runs into this folder"})),
        config=_pairs(_flat({**config["shared"], "seeds": config["seeds"], "arms": list(summary["arms"])})),
        table=_table(summary),
        meanings="".join(f"<dt>{html.escape(n)}</dt><dd>{html.escape(text)}</dd>" for n, _, text in _COLUMNS),
        plotly=get_plotlyjs(),
        plots=plots,
    )
    write_atomically(path, body.encode())


def _plot(name: str, title: str, note: str, spec: str) -> str:
    inline = spec.replace("</", "<\\/")
    return (
        f"<section><h2>{html.escape(title)}</h2><p>{html.escape(note)}</p>"
        f'<div class="plot" id="{name}"></div><script>draw("{name}", {inline})</script></section>'
    )


def _table(summary: Numbers) -> str:
    names = list(summary["arms"])
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    rows = [
        f"<tr><th title='{html.escape(text)}'>{html.escape(label)}</th>"
        + "".join(f"<td>{_cell(summary['arms'][name].get(key))}</td>" for name in names)
        + "</tr>"
        for label, key, text in _COLUMNS
    ]
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, dict):
        return f"{value['value']:.3f}<br><small>{value['low']:.3f} to {value['high']:.3f}</small>"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _flat(document: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in document.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return flat


def _pairs(flat: dict[str, str]) -> str:
    return "".join(f"<span><b>{html.escape(key)}</b> {html.escape(value)}</span>" for key, value in flat.items())


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #5a6470; --paper: #fff; --line: #d5dae0; --band: #f4f6f8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --dim: #9aa5b1; --paper: #14181d; --line: #333b45; --band: #1c2229 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1080px;
  margin: 0 auto; padding: 24px }
h1 { margin: 0 0 4px } h2 { margin: 32px 0 0; font-size: 18px } p { margin: 4px 0 8px; color: var(--dim) }
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

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>quads compare</title><style>{style}</style><script>{plotly}</script><script>
window.scriptErrors = []; window.addEventListener("error", e => window.scriptErrors.push(e.message));
const drawn = [];
function look() {{
  const css = getComputedStyle(document.documentElement), ink = css.getPropertyValue("--ink").trim();
  const line = css.getPropertyValue("--line").trim();
  const axis = {{ gridcolor: line, zerolinecolor: line, linecolor: line }};
  return {{ font: {{ color: ink }}, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", axis }};
}}
function draw(id, spec) {{
  const {{ axis, ...theme }} = look(), layout = {{ ...spec.layout, ...theme }};
  for (const key of Object.keys(layout)) if (/^[xy]axis/.test(key)) layout[key] = {{ ...axis, ...layout[key] }};
  drawn.push([id, spec]);
  Plotly.react(id, spec.data, layout, {{ responsive: true, displayModeBar: false }});
}}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.splice(0).forEach(p => draw(...p)));
</script></head><body>
<h1>quads compare</h1>
<p>The same GRPO run (TRL) from the same start, prompts, order and sampling noise, once under each numerics recipe.</p>
<p class="verdict">{verdict}</p>
<div class="stamp">{stamp}</div>
<div class="stamp">{config}</div>
<p>Accuracies and gaps are measured on this machine under emulated numerics (exact byte for byte, at emulation speed).
bf16 means unquantised: here both of its sides share one implementation and differ only in KV cache and batch shape, so
its gap is lower than the floor of a real inference engine. Importance-sampling correction is off in every arm.</p>
<div class="wide">{table}</div>
<h2>What the numbers mean</h2><dl>{meanings}</dl>
{plots}
</body></html>
"""
