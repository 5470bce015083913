"""The runs of a suite as jobs, in the order that keeps arms level: all cells and arms of one seed, then the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quads import recipes
from quads.compare.config import CompareConfig
from quads.compare.records import Records
from quads.suites.config import Suite, SuiteError


@dataclass(frozen=True)
class Job:
    """One arm and seed of one cell; `compare` is its comparison narrowed to them."""

    cell: str
    arm: str
    seed: int
    compare: CompareConfig

    @property
    def label(self) -> str:
        return f"{self.cell}/{self.arm}-seed{self.seed}"

    @property
    def steps(self) -> int:
        return self.compare.steps

    def finished(self) -> bool:
        """Whether its records are whole to the last step, or say that it failed: then it needs no checkpoint."""
        out, name = self.compare.out, recipes.load(self.arm).name
        mine = [[r for r in Records(out / f).read() if (r["arm"], r["seed"]) == (name, self.seed)] for f in _FILES]
        runs, evals, failures = mine
        trained = {record["step"] for record in runs} >= set(range(1, self.steps + 1))
        return bool(failures) or (trained and {0, self.steps} <= {record["step"] for record in evals})


_FILES = ("runs.jsonl", "evals.jsonl", "failures.jsonl")


def jobs(
    suite: Suite, out: Path, arms: Sequence[str] = (), seeds: Sequence[int] = (), report_to: str = ""
) -> list[Job]:
    """Every run of `suite`, or those of some of its arms and seeds; SuiteError for one that it has not."""
    for what, asked, known in (("arm", arms, suite.arms), ("seed", seeds, range(suite.seeds))):
        for one in asked:
            if one not in known:
                raise SuiteError(f"suite '{suite.name}' has no {what} {one} (it has {', '.join(map(str, known))})")
    free: dict[str, Any] = {"report_to": report_to} if report_to else {}
    return [
        Job(cell.name, arm, seed, dataclasses.replace(cell.compare, arms=(arm,), seeds=(seed,), **free))
        for seed in seeds or range(suite.seeds)
        for cell in suite.cells(out)
        for arm in arms or suite.arms
    ]
