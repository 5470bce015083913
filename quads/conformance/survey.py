"""Who conforms to what: every adapter that runs here, against its own dialect and against `exact`.

    python -m quads.conformance.survey OUT.json [ADAPTER ...] [NAME=SPEC ...]

All adapters where none is named. Writes one JSON document; docs/results/conformance/ holds a published one.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quads.conformance import adapters, check
from quads.conformance.check import CheckConfig


def survey(names: list[str], extra: dict[str, str]) -> dict[str, Any]:
    """A row for each quantiser; those that cannot run here say why."""
    rows = []
    for name in names:
        adapter = adapters.named(name)
        row = {"name": name, "source": adapter.source}
        reason = adapter.why_not()
        rows.append(row | ({"cannot_run": reason} if reason else _row(f"adapter:{name}", adapter.dialect)))
    for name, spec in extra.items():
        rows.append({"name": name, "source": spec} | _row(spec, ""))
    report = check.empty_report()
    return {"schema": 1, "label": report.label, "versions": report.versions, "rows": rows}


def _row(spec: str, dialect: str) -> dict[str, Any]:
    own = check.check_one(spec, "quantizer", CheckConfig(quantizer=spec, dialect=dialect))
    exact = check.check_one(spec, "quantizer", CheckConfig(quantizer=spec, dialect="exact"))
    return {
        "verdict": own.headline(),
        "passed": own.passed,
        "speaks": own.speaks,
        "findings": [asdict(finding) for finding in own.findings],
        "elements": own.elements,
        "seconds": round(own.seconds, 1),
        "against_exact": exact.headline(),
        "kinds": exact.kinds,
        "explanations": exact.explanations,
        "first": asdict(exact.first) if exact.first else None,
    }


def main(arguments: list[str]) -> None:
    out, *rest = arguments
    extra = dict(argument.split("=", 1) for argument in rest if "=" in argument)
    names = [argument for argument in rest if "=" not in argument]
    everything = [name for name, adapter in adapters.table().items() if adapter.kind == "quantizer"]
    document = survey(names or ([] if extra else everything), extra)
    Path(out).write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    for row in document["rows"]:
        print(row["name"], "|", row.get("verdict") or row["cannot_run"])


if __name__ == "__main__":
    main(sys.argv[1:])
