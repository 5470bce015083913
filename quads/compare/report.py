"""report.html of a comparison: one self-contained file (quads.page)."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from quads import page
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
    plots = "".join(page.plot(figure) for figure in figures(runs, evals))
    body = _BODY.format(
        verdict=html.escape(table.verdict(learned(summary))),
        stamp=page.pairs(page.flat({**stamp, "earlier": f"{len(stamp.get('earlier', []))} runs into this folder"})),
        config=page.pairs(page.flat({**config["shared"], "seeds": config["seeds"], "arms": list(summary["arms"])})),
        table=page.wide(_table(summary), "the arms' numbers"),
        meanings="".join(f"<dt>{html.escape(n)}</dt><dd>{html.escape(text)}</dd>" for n, _, text in _COLUMNS),
        plots=plots,
    )
    write_atomically(path, page.page("quads compare", body).encode())


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


_BODY = """<h1>quads compare</h1>
<p>The same GRPO run (TRL) from the same start, prompts, order and sampling noise, once under each numerics recipe.</p>
<p class="verdict">{verdict}</p>
{stamp}
{config}
<p>Accuracies and gaps are measured on this machine under emulated numerics (exact byte for byte, at emulation speed).
bf16 means unquantised: here both of its sides share one implementation and differ only in KV cache and batch shape, so
its gap is lower than the floor of a real inference engine. Importance-sampling correction is off in every arm.</p>
{table}
<h2>What the numbers mean</h2><dl>{meanings}</dl>
{plots}"""
