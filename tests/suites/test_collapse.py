"""A collapse is found where it was planted, and nowhere in noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quads.suites.collapse import RULE, Collapse, Series, find

STEPS = np.arange(1, 121)
EVALS = np.arange(0, 121, 20)
FLAT = np.full(len(STEPS), 0.8)
CALM = Series(STEPS, np.full(len(STEPS), 0.01))
GOOD = Series(EVALS, np.full(len(EVALS), 0.8))


def rewards(values: np.ndarray) -> Series:
    return Series(STEPS, values)


def dropped(at: int, by: float, lasting: int = 1000) -> np.ndarray:
    """FLAT, lower by `by` from step `at` on."""
    return FLAT - by * np.isin(STEPS, range(at, at + lasting))


@pytest.mark.parametrize("step", [20, 76, 111])
def test_a_planted_collapse_of_the_reward_is_found_at_its_step(step: int) -> None:
    noise = 0.02 * np.random.default_rng(step).normal(size=len(STEPS))
    assert find(rewards(dropped(step, 0.4) + noise), CALM, GOOD) == Collapse(step, "reward")


def test_noise_never_collapses() -> None:
    rng = np.random.default_rng(0)
    series = [rewards(0.5 + 0.3 * STEPS / 120 + 0.05 * rng.normal(size=len(STEPS))) for _ in range(300)]
    assert not any(find(one, CALM, GOOD) for one in series)


def test_a_dip_that_is_shorter_than_the_window_is_none() -> None:
    assert find(rewards(dropped(60, 0.5, RULE.window - 1)), CALM, GOOD) is None
    assert find(rewards(dropped(60, 0.5, RULE.window)), CALM, GOOD) == Collapse(60, "reward")


def test_a_drop_too_late_to_last_is_none() -> None:
    assert find(rewards(dropped(112, 0.5)), CALM, GOOD) is None


def test_a_drop_of_less_than_the_rule_is_none() -> None:
    assert find(rewards(dropped(60, 0.19)), CALM, GOOD) is None


def test_a_slow_decay_counts_from_where_it_is_deep_enough() -> None:
    found = find(rewards(np.where(STEPS < 40, 0.8, 0.8 - 0.01 * (STEPS - 40))), CALM, GOOD)
    assert found == Collapse(61, "reward")


def test_a_gap_past_the_bound_counts_from_its_first_step() -> None:
    gap = Series(STEPS, np.where(STEPS >= 50, 0.6, 0.3))
    assert find(rewards(FLAT), gap, GOOD) == Collapse(50, "gap")


def test_accuracy_must_stay_low_for_two_evaluations() -> None:
    once, twice = (np.array([0.8, 0.8, 0.8, *low, 0.8]) for low in ([0.5, 0.8], [0.5, 0.5]))
    assert find(rewards(FLAT), CALM, Series(EVALS[:6], once)) is None
    assert find(rewards(FLAT), CALM, Series(EVALS[:6], twice)) == Collapse(60, "accuracy")


def test_the_earliest_rule_that_holds_names_the_collapse() -> None:
    gap = Series(STEPS, np.where(STEPS >= 50, 0.6, 0.3))
    assert find(rewards(dropped(40, 0.5)), gap, GOOD) == Collapse(40, "reward")


def test_a_run_that_has_only_begun_has_not_collapsed() -> None:
    empty = Series(np.empty(0), np.empty(0))
    assert find(empty, empty, Series(np.array([0.0]), np.array([0.5]))) is None


@settings(max_examples=50)
@given(st.lists(st.integers(0, 10), min_size=1, max_size=60), st.integers(-5, 5))
def test_a_collapse_does_not_depend_on_the_level(eighths: list[int], shift: int) -> None:
    values, steps = np.array(eighths) / 8, np.arange(1, len(eighths) + 1)  # eighths: exact in binary
    assert find(Series(steps, values), CALM, GOOD) == find(Series(steps, values + shift), CALM, GOOD)
