"""Compile kernels and run the checks in several processes before anything is timed; compiled code is kept on disk.

    python -m quads.bench.warm OUT STAMP SHARE OF ONLY [quick]     one process's share

A process runs its checks, whose outcome it appends to OUT's results, then calls each case of its groups once. What
cannot run, or cannot be compiled, is left for the run to report.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from quads.bench import cases
from quads.bench.measure import checks, free, one_line
from quads.bench.results import ResultsFile
from quads.compare.records import Record

COMPILED = ("gemm", "moe", "quantize", "quantize_rac", "fake_quantize", "outer_scale")


def compile_all(
    out: Path,
    stamp: str,
    workers: int,
    only: Sequence[str],
    quick: bool,
    limit: float | None,
    meanwhile: Callable[[], object] = lambda: None,
) -> float:
    """Run all shares, and `meanwhile` here; seconds that it took. Beyond a third of `limit` processes are ended."""
    started = time.monotonic()
    command = [sys.executable, "-m", "quads.bench.warm", str(out), stamp]
    rest = [str(workers), ",".join(only), "quick" if quick else ""]
    os.environ.setdefault("QUADS_CUBIN_CACHE", str(Path.home() / ".cache" / "quads" / "cubins"))
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // workers))}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [subprocess.Popen([*command, str(i), *rest], env=environment, **quiet) for i in range(workers)]  # type: ignore[call-overload]
    meanwhile()
    deadline = None if limit is None else started + limit / 3
    for process in running:
        try:
            process.wait(None if deadline is None else max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
    return time.monotonic() - started


def share(file: ResultsFile, stamp: str, index: int, of: int, only: Sequence[str], quick: bool) -> int:
    """Every `of`-th check and group, `index` first; returns how many cases ran."""
    groups = cases.chosen(cases.catalogue("cuda"), only, quick)
    wanted = {group.op for group in groups}
    unique = list(dict.fromkeys(check for op, check in checks("cuda").items() if op in wanted))
    for check in unique[index::of]:
        file.append({**outcome(check), "stamp": stamp})
    held = [group for group in groups if group.op in COMPILED]
    return sum(_called(group) for group in held[(index - len(unique)) % of :: of])


def outcome(check: Callable[[], Iterator[str]]) -> Record:
    """The line of a check: what it compared, or why it failed."""
    started, compared, why = time.monotonic(), [], ""
    try:
        for name in check():
            compared.append(name)
    except Exception as error:
        why = one_line(error)
    took = round(time.monotonic() - started, 1)
    return {
        "kind": "check", "name": check.__name__, "passed": not why, "compared": compared, "why": why, "seconds": took
    }  # fmt: skip


def _called(group: cases.Group) -> int:
    """Call each case of a group once; returns how many ran."""
    ran = 0
    with contextlib.suppress(Exception):
        inputs = group.inputs()
        for case in group.cases:
            if not case.missing():
                with contextlib.suppress(Exception):
                    case.ready(inputs).calls[0]()
                    ran += 1
    free()
    return ran


if __name__ == "__main__":
    out, stamp, index, of, only = sys.argv[1:6]
    wanted = [op for op in only.split(",") if op]
    share(ResultsFile(Path(out)), stamp, int(index), int(of), wanted, "quick" in sys.argv[6:])
