"""A suite small enough to run in a test, in this process's workers or in a process that can be killed."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from quads.compare.records import Record, Records, untimed
from quads.suites import config, runner
from quads.suites.config import Suite
from quads.suites.runner import Options, Outcome

TOML = """
title = "t"
question = "q"
arms = ["bf16", "quads"]
seeds = 2
[settings]
steps = 3
prompts = 4
samples = 4
held_out = 16
eval_every = 2
[[variant]]
name = "slow"
lr = 1e-5
[[variant]]
name = "fast"
lr = 1e-3
"""

_SCRIPT = """
import sys
from pathlib import Path
from tests.suites.running import run
if __name__ == "__main__":
    run(Path(sys.argv[1]))
"""


def suite(folder: Path, **changes: Any) -> Suite:
    place = folder / "suite"
    place.mkdir(exist_ok=True)
    (place / "suite.toml").write_text(TOML)
    return config.load(str(place), changes)


def run(folder: Path, options: Options | None = None, **changes: Any) -> tuple[Outcome, str]:
    """Run the suite's first cell in folder/out; returns how it ended and what was said."""
    console = Console(file=io.StringIO(), width=200)
    options = options or Options(workers=2)
    one_cell = dataclasses.replace(whole := suite(folder, **changes), variants=whole.variants[:1])
    outcome = runner.run(one_cell, folder / "out", options, console)
    return outcome, console.file.getvalue()  # type: ignore[attr-defined]


def spawn(folder: Path) -> subprocess.Popen[bytes]:
    """`run(folder)` in a process of its own."""
    (folder / "script.py").write_text(_SCRIPT)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [sys.executable, str(folder / "script.py"), str(folder)]
    return subprocess.Popen(command, cwd=root, env=environment, **quiet)  # type: ignore[call-overload]


def records(folder: Path, name: str = "runs.jsonl") -> list[Record]:
    """Records without what is timed, in an order that does not depend on which worker was faster."""
    found = [untimed(record) for record in Records(folder / "out" / "slow" / name).read()]
    return sorted(found, key=lambda record: (record["arm"], record["seed"], record["step"]))
