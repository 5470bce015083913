"""Who conforms to what: every adapter that runs here, against its own dialect and against `exact`.

    python -m quads.conformance.survey OUT.json [--level full] [NAME=SPEC ...]

Writes one JSON document; docs/results/conformance/ holds a published one.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quads.conformance import adapters, check
from quads.conformance.check import CheckConfig


def survey(level: str = "quick", extra: dict[str, str] | None = None) -> dict[str, Any]:
    """A row for each quantiser; those that cannot run here say why."""
    rows = []
    for name, adapter in adapters.table().items():
        if adapter.kind == "quantizer":
            reason = adapter.why_not()
            rows.append({"name": name, "source": adapter.source, "cannot_run": reason} if reason else {
                "name": name, "source": adapter.source, **_row(f"adapter:{name}", adapter.dialect, level)
            })  # fmt: skip
    for name, spec in (extra or {}).items():
        rows.append({"name": name, "source": spec, **_row(spec, "", level)})
    report = check.empty_report()
    return {"schema": 1, "label": report.label, "versions": report.versions, "level": level, "rows": rows}


def _row(spec: str, dialect: str, level: str) -> dict[str, Any]:
    own = check.check_one(spec, "quantizer", CheckConfig(quantizer=spec, dialect=dialect, level=level))
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
    level = arguments.pop(arguments.index("--level") + 1) if "--level" in arguments else "quick"
    names = [argument for argument in arguments if argument != "--level"]
    extra = dict(argument.split("=", 1) for argument in names[1:])
    document = survey(level, extra)
    Path(names[0]).write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    for row in document["rows"]:
        print(row["name"], "|", row.get("verdict") or row["cannot_run"])


if __name__ == "__main__":
    main(sys.argv[1:])
