"""The HTML report: one self-contained page, no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from quads.conformance.result import CheckReport, TargetReport

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1c2430}
table{border-collapse:collapse;margin:.6rem 0;width:100%}td,th{border-bottom:1px solid #d5dae1;padding:.25rem .6rem;
text-align:left;vertical-align:top}pre{background:#f4f6f8;padding:.7rem;overflow-x:auto}
.pass{color:#116b3a}.fail,.error{color:#a3161b}.note{color:#5a6472}code{background:#f4f6f8}
"""


def page(report: CheckReport) -> str:
    """Verdicts on top, then each callable: explanations, findings, the first failing input, dialects, cases."""
    rows = "".join(
        f"<tr><td>{_mark(t)}</td><td>{escape(t.kind)}</td><td><code>{escape(t.spec)}</code></td>"
        f"<td>{escape(t.headline())}</td></tr>"
        for t in report.targets
    )
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>NVFP4 conformance</title><style>{_STYLE}</style>'
        f"<h1>NVFP4 conformance</h1><p>{escape(report.label)}; {escape(versions)}</p>"
        f"<table><tr><th></th><th>kind</th><th>callable</th><th>verdict</th></tr>{rows}</table>"
        + "".join(_section(target) for target in report.targets)
        + "</html>\n"
    )


def _mark(target: TargetReport) -> str:
    return '<b class="pass">pass</b>' if target.passed else '<b class="fail">fail</b>'


def _section(t: TargetReport) -> str:
    parts = [f"<h2>{escape(t.kind)} <code>{escape(t.spec)}</code></h2><p>{escape(t.headline())}</p>"]
    parts += [f"<p><b>Explained by:</b> {escape(text)}</p>" for text in t.explanations]
    if t.findings:
        rows = [(f.level, f.rule, f.message) for f in t.findings]
        parts.append(_table(("level", "rule", "what"), rows))
    if t.first:
        parts.append(
            f"<h3>First failing input</h3><p>{escape(t.first.case)}</p><pre>input    {escape(t.first.input_hex)}\n"
            f"expected {escape(t.first.expected)}\ngot      {escape(t.first.got)}</pre>"
        )
        parts += [f"<pre>{escape(t.first.explain)}</pre>"] if t.first.explain else []
    parts.append("<h3>Nearest</h3>" + _table(("speaks", "differing", "detail"), [_row(c) for c in t.candidates[:12]]))
    bad = [(c.name, c.group, c.message) for c in t.cases if c.differing]
    if bad and not t.conforms:
        parts.append(f"<h3>Cases that differ from {escape(t.against)}</h3>" + _table(("case", "group", "what"), bad))
    parts.append(f'<p class="note">{t.calls} calls, {t.elements} elements, {t.seconds:.1f} s</p>')
    return "".join(parts)


def _row(candidate: object) -> tuple[str, ...]:
    return tuple(str(value) for value in vars(candidate).values())


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"
