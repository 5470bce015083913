"""Jobs for the pool's tests: what a worker runs is found by name in its own process, so it lives in a module."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class PoolJob:
    """Does `what`; `folder` remembers attempts."""

    label: str
    what: str
    folder: Path
    steps: int = 3

    @property
    def compare(self) -> Any:
        return SimpleNamespace(out=self.folder)

    @property
    def log(self) -> Path:
        return self.folder / f"{self.label}.log"


def run(job: PoolJob, on_step: Callable[[int], None], say: Callable[[str], None], stop: Callable[[], bool]) -> int:
    with job.log.open("a") as handle:
        handle.write(f"{os.getpid()}\n")
    attempt = len(job.log.read_text().splitlines())
    if job.what == "die" or (job.what == "die once" and attempt == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if job.what == "lose the gpu once" and attempt == 1:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if job.what == "bad input":
        raise ValueError("field 'x' is 1, not 2")
    if job.what == "full disk":
        raise OSError(errno.ENOSPC, "No space left on device", "runs.jsonl")
    for step in range(1, job.steps + 1):
        if job.what == "slow":
            time.sleep(0.2)
        on_step(step)
        if stop():
            return step
    return job.steps
