"""The pytest-benchmark suites: readings that only subtract do as a timer; what cannot run is skipped by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quads.bench.suite import cases_of
from quads.bench.timing import Moment

SUITE = '''
import time

import pytest


class Reading:
    """Like a CUDA event: later - earlier is seconds, and that is all it can do."""

    def __init__(self):
        self.at = time.perf_counter()

    def __sub__(self, earlier):
        return self.at - earlier.at


@pytest.mark.benchmark(timer=Reading, group="a group")
def test_a_call(benchmark):
    benchmark.pedantic(time.sleep, args=(0.01,), setup=lambda: None, rounds=3)
    benchmark.extra_info["bytes"] = 8
'''


def test_readings_that_only_subtract_are_a_timer_of_pytest_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", str(tmp_path), "--benchmark-only", "-q", "-p", "no:cacheprovider"]
    out = tmp_path / "benchmark.json"
    subprocess.run([*command, f"--benchmark-json={out}"], check=True, capture_output=True, cwd=tmp_path)
    (found,) = json.loads(out.read_text())["benchmarks"]
    assert 0.01 <= found["stats"]["median"] < 1
    assert (found["stats"]["rounds"], found["extra_info"], found["group"]) == (3, {"bytes": 8}, "a group")


def test_cases_of_a_gpu_are_timed_by_its_events_and_skipped_by_name_without_one() -> None:
    marked = [p for p in cases_of("gemm").args[1] if "quads.kernels" in p.id]
    timers = {mark.kwargs["timer"] for p in marked for mark in p.marks if mark.name == "benchmark"}
    assert timers == {Moment}
    if not torch.cuda.is_available():
        reasons = {mark.kwargs["reason"] for p in marked for mark in p.marks if mark.name == "skip"}
        assert reasons == {"needs a CUDA GPU; found no CUDA GPU"}


def test_only_the_first_shapes_run_unless_all_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = len(cases_of("quantize").args[1])
    monkeypatch.setenv("QUADS_FULL", "1")
    assert len(cases_of("quantize").args[1]) > quick
