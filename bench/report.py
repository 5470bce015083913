"""report.html of a folder of results, and table.md beside it.

On top what decides how far to trust the rest: stamp, marks, what is absent, skipped or failed, and the goals. Then what
was measured, then what is modelled, each in a part of its own, every figure's numbers as a table too.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from quads import page
from quads.bench import figures, figures_model, figures_rollout, figures_scaling, model_error, report_tables, table
from quads.bench.results import Result, ResultsFile
from quads.bench.specs import chips
from quads.compare.figures import color
from quads.compare.records import Record, write_atomically
from quads.page_choices import ChosenFigure, plot, selector, tick_boxes

_STYLE = """
.modelled { border-left: 4px solid #eeca3b; padding-left: 16px; margin-top: 40px }
h3 { margin: 24px 0 0; font-size: 16px } ul { margin: 4px 0 8px; padding-left: 20px; color: var(--dim) }
summary { cursor: pointer; padding: 4px 0 } table.left td, table.left th { text-align: left }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 14px; margin: 8px 0 }
"""

_MODELLED = (
    "Nothing below ran on the chips it names. Times are of a model of bytes, FLOPs, issued instructions and launches"
    " (quads.bench.work); its error where it can be checked is printed beside every prediction."
)


def write_report(folder: Path) -> Path:
    """Write report.html and table.md of the results in `folder`; returns the report's path.

    FileNotFoundError without results.jsonl; RecordsError for a line that is not one.
    """
    file = ResultsFile(folder)
    measured, modelled = list(file.results("measured")), list(file.results("modelled"))
    body = "".join([
        _top(file, measured, modelled),
        _measured(measured),
        _modelled(file, modelled) if modelled else "",
        report_tables.everything(measured),
    ])  # fmt: skip
    path = folder / "report.html"
    write_atomically(path, page.page("quads bench", body, style=_STYLE).encode())
    write_atomically(folder / "table.md", table.markdown(folder).encode())
    return path


def _top(file: ResultsFile, measured: Sequence[Result], modelled: Sequence[Result]) -> str:
    stamps = file.stamps()
    stamp = _shown(stamps[-1] if stamps else {})
    marked = sum(one.conditions.marked is not None for one in measured)
    verdict = f"{len(measured)} cases measured, {marked} of them on a throttled or shared machine (†);" * bool(measured)
    families = dict.fromkeys(figures.family(one.numerics) for one in [*measured, *modelled] if one.op != "ceiling")
    links = [("measured", "Measured"), ("modelled", "Modelled"), ("chips-table", "Chips"), ("all", "All results")]
    return "".join([
        "<h1>quads bench</h1><p>Kernels, layers and rollouts of every numerics beside the peers a user would pick.</p>",
        f'<p class="verdict">{verdict} {len(modelled)} modelled predictions.</p>',
        page.pairs(page.flat({**stamp, "earlier": f"{max(0, len(stamps) - 1)} runs into this folder"})),
        *(page.pairs(page.flat(_shown(one))) for one in file.records("stamp") if "of" in one),
        _left_out(file),
        report_tables.goals(measured),
        "<nav>" + "".join(f'<a href="#{name}">{text}</a>' for name, text in links) + "</nav>",
        f'<div class="tools">{tick_boxes("Numerics shown", {name: color(name) for name in families})}</div>',
    ])  # fmt: skip


def _shown(stamp: Record) -> Record:
    """A stamp without what only the file needs; of what it is the stamp, first."""
    return {key: stamp[key] for key in sorted(stamp, key=lambda key: key != "of") if key not in ("kind", "schema")}


def _left_out(file: ResultsFile) -> str:
    """What is not in the figures, and why, with equal reasons together."""
    parts = []
    for kind, title in (("failed", "Failed"), ("absent", "Absent peers"), ("skipped", "Skipped")):
        reasons: dict[str, list[str]] = {}
        for record in file.records(kind):
            name = str(record.get("peer") or record.get("case"))
            if name not in reasons.setdefault(str(record["why"]), []):
                reasons[str(record["why"])].append(name)
        if reasons:
            entries = "".join(f"<li>{html.escape(f'{why}: {_some(names)}')}</li>" for why, names in reasons.items())
            count = sum(map(len, reasons.values()))
            opened = " open" if kind != "skipped" or count <= 12 else ""
            parts.append(f"<details{opened}><summary>{title} ({count})</summary><ul>{entries}</ul></details>")
    return "".join(parts)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:8])} and {len(names) - 8} more"


def _measured(measured: Sequence[Result]) -> str:
    if not measured:
        return '<h2 id="measured">Measured</h2><p>Nothing was measured into this folder.</p>'
    return "".join([
        '<section><h2 id="measured">Measured</h2><p>On the machine of the stamp above.</p>',
        _chosen(figures.bars(measured), "group", "Operation and shape"),
        _drawn(figures.roof(measured)),
        _drawn(figures_rollout.measured(measured)),
        _chosen(figures_scaling.scaling(measured), "scaling", "Scaling of"),
        _chosen(figures_scaling.energy(measured), "energy", "Energy of"),
        "</section>",
    ])  # fmt: skip


def _modelled(file: ResultsFile, modelled: Sequence[Result]) -> str:
    models = list(dict.fromkeys(one.way for one in modelled if one.op == "rollout"))
    keys = [(key, chip.name) for key, chip in chips().items() if any(one.chip == key for one in modelled)]
    picked = selector("chip", "Chip", keys) + selector("model", "Model", [(name, name) for name in models])
    return "".join([
        f'<section class="modelled"><h2 id="modelled">Modelled</h2><p>{_MODELLED}</p>',
        plot(figures_model.checked(*model_error.checks_of(file))),
        _chosen(figures_model.on_chips(modelled), "modelled", "Operation and shape"),
        f'<div class="tools">{picked}</div>',
        _drawn(figures_rollout.against_fp8(modelled)),
        _drawn(figures_rollout.modelled(modelled)),
        plot(figures_rollout.over_ratio()),
        plot(figures_model.roofs()),
        report_tables.errors(modelled),
        report_tables.specifications(),
        "</section>",
    ])  # fmt: skip


def _chosen(figure: ChosenFigure, name: str, label: str) -> str:
    """A figure under a selector of its documents; nothing where it has none."""
    if not figure.specs:
        return ""
    options = [(key, key) for key in figure.specs]
    return f'<div class="tools">{selector(name, label, options)}</div>{plot(figure)}'


def _drawn(figure: ChosenFigure) -> str:
    return plot(figure) if figure.specs else ""
