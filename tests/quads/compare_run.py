"""A comparison small enough for a test, run in this process or in one of its own that can be killed."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from quads.compare import job
from quads.compare.config import CompareConfig
from quads.compare.records import Record, Records, untimed

SMALL: dict[str, Any] = {"arms": ("quads",), "steps": 3, "prompts": 4, "samples": 4, "held_out": 16, "eval_every": 2}

# A shell that puts the tests in the background has interrupts ignored, and children inherit that.
_SCRIPT = """
import signal, sys
from pathlib import Path
from tests.quads.compare_run import run
signal.signal(signal.SIGINT, signal.default_int_handler)
run(Path(sys.argv[1]))
"""


def config(out: Path, **changes: Any) -> CompareConfig:
    return CompareConfig(out=out, **{**SMALL, **changes})


def run(out: Path, **changes: Any) -> str:
    """Run to the end; returns what was said."""
    said = Console(file=io.StringIO(), width=200)
    job.run(config(out, **changes), said)
    return said.file.getvalue()  # type: ignore[attr-defined]


def spawn(out: Path) -> subprocess.Popen[bytes]:
    """`run(out)` in a process of its own."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-c", _SCRIPT, str(out)], cwd=root, env=environment, **quiet)  # type: ignore[call-overload]


def records(out: Path) -> list[Record]:
    return [untimed(record) for record in Records(out / "runs.jsonl").read()]


def evaluations(out: Path) -> list[Record]:
    return Records(out / "evals.jsonl").read()
