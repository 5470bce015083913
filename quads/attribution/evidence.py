"""The evidence table on real weights: dense and upcycled, with and without outlier stress.

    python -m quads.attribution.evidence OUT [CASE ...]

writes OUT/<case>.json for each case, and OUT/table.md over all cases that OUT then holds. Cases that are there already
are kept: delete a file to run its case again.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from quads import models, provenance
from quads.attribution.diagnosis import Plan, diagnose
from quads.attribution.variants import REFERENCE, WEIGHTS
from quads.diagnose_job import read_prompts
from quads.stress import Stress, add_outliers
from quads.upcycle import upcycle

PLAN = Plan(isolate=False)
MAX_TOKENS = 48
_TABLES = ("tokens", "prompts", "layers", "weights", "gaps", "errors", "paired", "terms", "advice")


@dataclass(frozen=True)
class Case:
    """A model made of SmolLM2-135M: dense, or a mixture of experts of it; with `outliers` of 36 blocks stressed."""

    build: Callable[[nn.Module], nn.Module]
    outliers: int
    title: str


def _dense(model: nn.Module) -> nn.Module:
    return model


CASES = {
    "dense": Case(_dense, 0, "dense, every decoder linear"),
    "dense-stress-8": Case(_dense, 8, "dense, outliers in 8 of 36 blocks"),
    "dense-stress-27": Case(_dense, 27, "dense, outliers in 27 of 36 blocks"),
    "moe": Case(upcycle, 0, "upcycled 4 experts top-2, routed experts"),
    "moe-stress-8": Case(upcycle, 8, "upcycled, outliers in 8 of 36 blocks"),
    "moe-stress-27": Case(upcycle, 27, "upcycled, outliers in 27 of 36 blocks"),
}


def run_case(name: str) -> dict[str, Any]:
    """Diagnose one case; the document that its JSON file holds."""
    case, started, cpu = CASES[name], time.perf_counter(), time.process_time()
    loaded = models.load(models.SMOLLM2)
    model = case.build(loaded.model)
    if case.outliers:
        add_outliers(model, Stress(channels=case.outliers))
    result = diagnose(model, loaded.tokenizer, read_prompts(), plan=PLAN, max_tokens=MAX_TOKENS).to_dict()
    return {
        "schema": 1,
        "case": name,
        "title": case.title,
        "label": "emulated (CPU)",
        "note": loaded.note,
        **{key: result[key] for key in _TABLES},
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "stamp": provenance.stamp(seeds=PLAN.seeds),
    }


def table(documents: list[dict[str, Any]]) -> str:
    """Markdown: a table a case, gap and layer error of every variant with their intervals over prompts."""
    return "\n".join(_case_table(document) for document in documents)


def _case_table(document: dict[str, Any]) -> str:
    gaps = {(row["variant"], row["against"]): row for row in document["gaps"]}
    errors = {(row["variant"], row["against"]): row for row in document["errors"]}
    lines = [
        f"### {document['title']} (`{document['case']}`)",
        "",
        f"{document['tokens']} tokens of {document['prompts']} prompts, {document['weights']} weights. Emulated (CPU).",
        "",
        "| variant | gap to BF16 | p99 | max | gap to Q(W) | layer error | error against Q(W) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(row["variant"] for row in document["gaps"]):
        row = gaps[name, REFERENCE]
        cells = [_cell(row, 1, ""), f"{row['p99']:.3f}", f"{row['max']:.3f}", _cell(gaps.get((name, WEIGHTS)), 1, "")]
        cells += [_cell(errors.get((name, against)), 100, " %") for against in (REFERENCE, WEIGHTS)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "Paired over prompts, gap to Q(W) of top-residual selection minus that of the control:", ""]
    for row in document["paired"]:
        lines.append(f"* {row['variant']} − {row['minus']}: {_signed(row)}")
    return "\n".join([*lines, ""])


def _cell(row: dict[str, Any] | None, scale: float, unit: str) -> str:
    if row is None:
        return ""
    mean, low, high = (scale * row[key] for key in ("mean", "low", "high"))
    digits = 2 if unit else 4
    return f"{mean:.{digits}f}{unit} ({low:.{digits}f}–{high:.{digits}f})"


def _signed(row: dict[str, Any]) -> str:
    verdict = "better" if row["high"] < 0 else "worse" if row["low"] > 0 else "undecided"
    return f"{row['mean']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f}), {verdict}"


def main(arguments: list[str]) -> None:
    """Run the cases named (default all) that are not there yet, then write the table."""
    folder, names = Path(arguments[0]), arguments[1:] or list(CASES)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = folder / f"{name}.json"
        if not path.exists():
            document = run_case(name)
            path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {document['seconds']} s; {document['advice']}", flush=True)
    documents = [
        json.loads((folder / f"{name}.json").read_text()) for name in CASES if (folder / f"{name}.json").exists()
    ]
    (folder / "table.md").write_text(table(documents), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
