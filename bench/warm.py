"""Compile kernels in several processes before anything is timed: Triton's and DeepGEMM's caches are on disk.

    python -m quads.bench.warm SHARE OF [ONLY] [quick]     one process's share of the groups

A process calls each case of its groups once. What cannot run, or cannot be compiled, is left for the run to report.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence

from quads.bench import cases
from quads.bench.measure import checks, free

OPERATIONS = ("gemm", "moe", "quantize", "quantize_rac", "fake_quantize", "outer_scale")


def compile_all(workers: int, only: Sequence[str], quick: bool, limit: float | None) -> float:
    """Run all shares; seconds that it took. Processes beyond a third of `limit` seconds are ended."""
    started = time.monotonic()
    command = [sys.executable, "-m", "quads.bench.warm"]
    rest = [",".join(only), "quick" if quick else ""]
    running = [
        subprocess.Popen([*command, str(i), str(workers), *rest], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for i in range(workers)
    ]
    deadline = None if limit is None else started + limit / 3
    for process in running:
        try:
            process.wait(None if deadline is None else max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
    return time.monotonic() - started


def share(index: int, of: int, only: Sequence[str], quick: bool) -> int:
    """Call the cases of every `of`-th group, and some of the checks; returns how many ran."""
    ran = 0
    groups = cases.chosen(cases.catalogue("cuda"), only, quick)
    for group in [g for g in groups if g.op in OPERATIONS][index::of]:
        with contextlib.suppress(Exception):
            inputs = group.inputs()
            for case in group.cases:
                if not case.missing():
                    with contextlib.suppress(Exception):
                        case.ready(inputs).calls[0]()
                        ran += 1
        free()
    wanted = {op for op in OPERATIONS if not only or op in only}
    unique = list(dict.fromkeys(check for op, check in checks("cuda").items() if op in wanted))
    for check in unique[index::of]:
        with contextlib.suppress(Exception):
            ran += len(list(check()))
    return ran


if __name__ == "__main__":
    share(int(sys.argv[1]), int(sys.argv[2]), [op for op in sys.argv[3].split(",") if op], "quick" in sys.argv[4:])
