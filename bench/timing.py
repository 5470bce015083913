"""Time calls that do the same work on different inputs, several implementations in the same rounds.

On a GPU a sample is one replay of a CUDA graph that holds one call, between two events, after L2 was cleared; clearing
it also hides the launch. `in a row` is one graph that holds the calls on all inputs, replayed for some tenths of a
second and divided by the number of calls: launches overlap as they do in a decoding step, weights are cold because the
inputs rotate, and the energy counter has time to move. What cannot be captured is called directly.
On a CPU a sample is one call: CPU time where torch has one thread, so that a busy machine is told from a slow call,
else wall-clock time.

Each round takes one sample of each implementation, so that ratios are of neighbours. Intervals are those of the
median at 95 %, from order statistics; no distribution is assumed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch

Call = Callable[[], Any]
INTERVAL = "95 % of the median"
ROUNDS = 30
FEWEST = 5
SECONDS = 0.6  # that the rounds of one case may take, beyond the fewest


class Runner(Protocol):
    """Calls made ready to be timed."""

    method: str

    def active(self) -> AbstractContextManager[Any]:
        """Where `prepare` and `call` happen: the runner's own CUDA stream."""

    def prepare(self) -> None:
        """Clear the caches, without waiting for it."""

    def call(self, turn: int) -> None:
        """One call; `turn` chooses the inputs."""

    def sample(self, turn: int) -> float:
        """Seconds of one call."""

    def in_a_row(self, seconds: float) -> float | None:
        """Seconds of a call among others, called for `seconds`; None where that is not measured."""


class CpuRunner:
    """Calls on the CPU, caches as they are."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        single = torch.get_num_threads() == 1
        self._clock = time.process_time if single else time.perf_counter
        self.method = "CPU time, one thread" if single else f"wall-clock time, {torch.get_num_threads()} threads"
        calls[0]()

    def active(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def prepare(self) -> None:
        """Nothing: a CPU's caches hold what they hold in use."""

    def call(self, turn: int) -> None:
        self._calls[turn % len(self._calls)]()

    def sample(self, turn: int) -> float:
        start = self._clock()
        self.call(turn)
        return self._clock() - start

    def in_a_row(self, seconds: float) -> float | None:
        return None


@cache
def flush_buffer() -> torch.Tensor:
    """Memory several times as large as any L2; writing it evicts everything else."""
    return torch.empty(2**28, dtype=torch.uint8, device="cuda")


class Moment:
    """A point of the current CUDA stream; later - earlier is seconds, and waits for the later one."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def __sub__(self, earlier: Moment) -> float:
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) * 1e-3


class CudaRunner:
    """Calls on the current CUDA device, as graphs or directly."""

    def __init__(self, calls: Sequence[Call], *, graph: bool = True) -> None:
        self._stream = torch.cuda.Stream()
        for call in calls:
            call()
        torch.cuda.synchronize()
        self._alone = [self._captured([call]) for call in calls] if graph else list(calls)
        self._together = self._captured(calls) if graph and len(calls) > 1 else self._alone[0]
        self._count = len(calls) if graph else 1
        self.method = ("CUDA graph" if graph else "direct call") + ", events, L2 cleared"

    def active(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def prepare(self) -> None:
        flush_buffer().zero_()

    def call(self, turn: int) -> None:
        self._alone[turn % len(self._alone)]()

    def sample(self, turn: int) -> float:
        with self.active():
            self.prepare()
            return _span(lambda: self.call(turn))

    def in_a_row(self, seconds: float) -> float | None:
        with self.active():
            once = statistics.median(_span(self._together) for _ in range(3))
            repeats = max(3, math.ceil(seconds / max(once, 1e-6)))
            took = _span(lambda: _repeat(self._together, repeats)) / repeats
        return took / self._count

    def _captured(self, calls: Sequence[Call]) -> Call:
        with self.active():
            for call in calls:
                call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream):
                for call in calls:
                    call()
        return graph.replay


def _repeat(call: Call, times: int) -> None:
    for _ in range(times):
        call()  # what it returns is let go at once: a thousand results would fill the GPU


def _span(work: Call) -> float:
    start = Moment()
    work()
    return Moment() - start


def runner(calls: Sequence[Call], device: str, *, graph: bool = True) -> Runner:
    """The runner for `device`, "cpu" or "cuda"; calls[0] has run once (everything is compiled)."""
    return CudaRunner(calls, graph=graph) if device == "cuda" else CpuRunner(calls)


def rounds(runners: Sequence[Runner], most: int = ROUNDS, seconds: float = SECONDS) -> list[list[float]]:
    """Samples of each runner, one of each a round, in turns forwards and backwards.

    Stops after `seconds` a runner, once there are the fewest.
    """
    samples: list[list[float]] = [[] for _ in runners]
    for r in runners:
        r.sample(0)
    started = time.perf_counter()
    for turn in range(most):
        if turn >= FEWEST and time.perf_counter() - started > seconds * len(runners):
            break
        pairs = list(zip(samples, runners, strict=True))
        for own, r in reversed(pairs) if turn % 2 else pairs:
            own.append(r.sample(turn))
    return samples


def rounds_for(once: float, seconds: float = SECONDS) -> int:
    """Rounds of a case whose call takes `once` seconds."""
    return max(FEWEST, min(ROUNDS, int(seconds / max(once, 1e-9))))


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): the order statistics between which the median lies with 95 % (or as near as n allows)."""
    ordered = sorted(values)
    n, below, rank = len(ordered), 0.0, 0
    while rank < n // 2:
        below += math.comb(n, rank) / 2**n
        if below > 0.025:
            break
        rank += 1
    first = max(0, rank - 1)
    return statistics.median(ordered), ordered[first], ordered[n - 1 - first]


def ratio_interval(samples: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """`median_interval` of samples / base, round by round."""
    return median_interval([a / b for a, b in zip(samples, base, strict=True)])
