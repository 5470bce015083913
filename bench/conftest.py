"""The fixture of the pytest-benchmark suites: one case, checked, then timed by pytest-benchmark itself.

On a GPU its timer reads CUDA events: a reading is a point of the stream and the difference of two is seconds, so
clearing L2 in the setup of each round hides the launch, as in `quads bench run`. Counted bytes and FLOPs, the error of
the check and what NVML saw are in `extra_info`; JSON, histograms and --benchmark-compare are pytest-benchmark's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch

from quads.bench import measure, timing
from quads.bench.cases import Case, Group
from quads.bench.monitor import Monitor

Measured = Callable[[Group, Case], None]


@pytest.fixture(scope="session")
def monitor() -> Iterator[Monitor]:
    with Monitor.here() as found:
        yield found


@pytest.fixture(scope="session")
def passed() -> dict[str, str]:
    """Operation -> "" once its checks passed, else why not."""
    return {}


@pytest.fixture
def measured(benchmark: Any, monitor: Monitor, passed: dict[str, str]) -> Iterator[Measured]:
    """Check the operation, check the case, time it."""

    def run(group: Group, case: Case) -> None:
        _operation_is_right(group, passed)
        torch.manual_seed(measure.seed_of(group))
        ready = case.ready(group.inputs())
        error = ready.check() if ready.check else None
        assert error is None or error <= 1, f"wrong result: {error} times the bound; not timed"
        runner = timing.runner(ready.calls, group.device, graph=ready.graph)
        turns, window, rounds = itertools.count(), monitor.window(), timing.rounds_for(runner.sample(0), group.seconds)
        with runner.active():
            benchmark.pedantic(lambda: runner.call(next(turns)), setup=runner.prepare, rounds=rounds)
        counted = {
            "bytes": ready.bytes,
            "flops": ready.flops,
            "error": error,
            "way": ready.way,
            "method": runner.method,
        }
        benchmark.extra_info.update(
            op=group.op, numerics=case.numerics, variant=case.variant, implementation=case.implementation,
            shape=group.shape, **counted, conditions=asdict(window.conditions()),
        )  # fmt: skip

    yield run
    measure.free()


def _operation_is_right(group: Group, passed: dict[str, str]) -> None:
    check = measure.checks(group.device).get(group.op)
    if check is not None and check.__name__ not in passed:
        passed[check.__name__] = "failed"
        list(check())
        passed[check.__name__] = ""
    assert check is None or not passed[check.__name__], f"the check '{check.__name__}' failed: nothing is timed"
