"""Do two machines measure the same? Probes of the same policy and the same tokens beside each other, arm by arm.

    python -m quads.suites.probe_agreement CPU_FOLDER GPU_FOLDER > agreement.md

Carry OUT/probe-tokens-*.safetensors to the other machine before its probe, so that both score the same tokens. A
quantised model amplifies last bits (a code flips, a router flips), so single tokens differ by about the engine floor;
what must agree is each arm's gap, and which sequences it comes from.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quads.compare.records import Record, Records
from quads.errors import CannotRunHereError

Place = tuple[str, str, str, str]  # policy, outliers, arm, reference


@dataclass(frozen=True)
class Agreement:
    """Mean gap of one arm on both machines over their common draws, and the correlation over sequences."""

    place: Place
    ours: float
    theirs: float
    correlation: float
    sequences: int

    @property
    def ratio(self) -> float:
        """theirs / ours, 1 where both are 0."""
        return self.theirs / self.ours if self.ours else 1.0 if self.theirs == 0 else float("inf")


def agree(ours: Path, theirs: Path) -> list[Agreement]:
    """Every arm that both folders measured on the same tokens; CannotRunHereError where there is none."""
    a, b = _by_place(ours), _by_place(theirs)
    rows = [_agreement(place, a[place], b[place]) for place in a if place in b]
    found = [row for row in rows if row is not None]
    if not found:
        raise CannotRunHereError(f"{ours} and {theirs} share no record of the same policy and tokens: carry the tokens")
    return found


def table(rows: list[Agreement], labels: tuple[str, str]) -> str:
    """Markdown, a line an arm."""
    lines = [
        f"| policy | outliers | arm | against | gap, {labels[0]} | gap, {labels[1]} | ratio | correlation |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        numbers = f"{row.ours:.5f} | {row.theirs:.5f} | {row.ratio:.3f} | {row.correlation:.3f}"
        lines.append(f"| {' | '.join(row.place)} | {numbers} |")
    return "\n".join(lines) + "\n"


def _by_place(folder: Path) -> dict[Place, dict[tuple[str, int], Record]]:
    """Records by place, then by (identity of the tokens, draw)."""
    found: dict[Place, dict[tuple[str, int], Record]] = {}
    for record in Records(folder / "probe.jsonl").read():
        if record.get("kind") != "layer":
            place = (record["policy"], record["outliers"], record["arm"], record["reference"])
            found.setdefault(place, {})[record["identity"], record["draw"]] = record
    return found


def _agreement(place: Place, a: dict[tuple[str, int], Record], b: dict[tuple[str, int], Record]) -> Agreement | None:
    shared = sorted(set(a) & set(b))
    if not shared:
        return None
    x, y = (np.concatenate([side[key]["probe/by_sequence"] for key in shared]) for side in (a, b))
    ours, theirs = (float(np.mean([side[key]["probe/gap_mean"] for key in shared])) for side in (a, b))
    spread = x.std() > 0 and y.std() > 0
    return Agreement(place, ours, theirs, float(np.corrcoef(x, y)[0, 1]) if spread else 1.0, len(x))


def main(arguments: list[str]) -> None:
    """Print the table of two folders."""
    first, second = (Path(argument) for argument in arguments)
    labels = [Records(folder / "probe.jsonl").read()[0]["label"] for folder in (first, second)]
    print(table(agree(first, second), (labels[0], labels[1])), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
