"""Rounds take neighbours, intervals cover the median, ratios are pair by pair."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from quads.bench import timing


class Scripted:
    """A runner whose samples are given."""

    method = "scripted"

    def __init__(self, name: str, seconds: float, log: list[str]) -> None:
        self.name, self.seconds, self.log = name, seconds, log

    def active(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def prepare(self) -> None:
        pass

    def call(self, turn: int) -> None:
        pass

    def sample(self, turn: int) -> float:
        self.log.append(self.name)
        return self.seconds + turn

    def in_a_row(self, seconds: float) -> float | None:
        return None


def test_each_round_takes_one_sample_of_each_in_turns_forwards_and_backwards() -> None:
    log: list[str] = []
    samples = timing.rounds([Scripted("a", 0.0, log), Scripted("b", 10.0, log)], most=2)
    assert log == ["a", "b", "a", "b", "b", "a"]  # the first two warm up
    assert samples == [[0.0, 1.0], [10.0, 11.0]]


def test_rounds_end_after_the_given_seconds_but_not_before_the_fewest() -> None:
    samples = timing.rounds([Scripted("a", 0.0, [])], seconds=0.0)
    assert len(samples[0]) == timing.FEWEST


@pytest.mark.parametrize(("once", "rounds"), [(1e-6, timing.ROUNDS), (10.0, timing.FEWEST), (0.06, 10)])
def test_a_slow_call_gets_fewer_rounds(once: float, rounds: int) -> None:
    assert timing.rounds_for(once, seconds=0.6) == rounds


@pytest.mark.parametrize("n", [6, 9, 20, 30])
def test_the_interval_of_the_median_covers_it_in_95_of_100_draws(n: int) -> None:
    generator = np.random.default_rng(n)
    inside = 0
    for _ in range(2000):
        _, low, high = timing.median_interval(list(generator.exponential(size=n)))
        inside += low <= np.log(2) <= high
    assert 0.94 <= inside / 2000 <= 1.0


def test_the_interval_is_no_wider_than_it_must_be() -> None:
    assert timing.median_interval(list(range(1, 21)))[1:] == (6, 15)  # tables of the binomial: n = 20


def test_ratios_are_of_the_same_round() -> None:
    slower, base = [2.0, 20.0, 200.0], [1.0, 10.0, 100.0]
    assert timing.ratio_interval(slower, base) == (2.0, 2.0, 2.0)


def test_a_cpu_call_of_one_thread_is_measured_in_cpu_time() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert timing.runner([lambda: None], "cpu").method == "CPU time, one thread"
    finally:
        torch.set_num_threads(before)


def test_calls_rotate_over_their_inputs() -> None:
    seen: list[int] = []
    runner = timing.CpuRunner([lambda: seen.append(0), lambda: seen.append(1)])
    seen.clear()
    for turn in range(4):
        runner.sample(turn)
    assert seen == [0, 1, 0, 1]


@pytest.mark.gpu
def test_l2_is_cleared_before_each_sample_and_graphs_replay_the_call() -> None:
    x = torch.zeros(2**20, device="cuda")
    runner = timing.CudaRunner([lambda: x.add_(1)])
    before = x.clone()
    assert runner.sample(0) > 0
    assert torch.equal(x, before + 1)
    assert int(timing.flush_buffer().max()) == 0


def test_results_of_calls_in_a_row_are_let_go_at_once() -> None:
    alive: list[int] = []

    class Kept:
        def __init__(self) -> None:
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    timing._repeat(lambda: (Kept(), most.append(len(alive))), 5)
    assert max(most) == 1


most: list[int] = []
