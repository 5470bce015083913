"""When a run counts as collapsed: one stated rule, with the step at which it first held.

A run collapses at the first step from which on, for `window` steps in a row, its reward lies `drop` below the best
that it has had (the highest mean of `window` steps before), or its mean gap lies above `gap`; or from which on two
evaluations in a row lie `drop` below the best accuracy before. What begins in a run's last steps, too late to last for
a window, does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class CollapseRule:
    """drop: of reward or accuracy, absolute. window: training steps. evaluations: held-out evaluations in a row.

    gap: nats a token (mean over a step's tokens). At 0.5 the typical importance ratio is 1.65, beyond every clip.
    """

    drop: float = 0.2
    window: int = 10
    evaluations: int = 2
    gap: float = 0.5


RULE = CollapseRule()


@dataclass(frozen=True)
class Series:
    """Values over increasing steps; both 1-D and of one length."""

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Collapse:
    """The first step at which a rule held, and which one: "reward", "accuracy" or "gap"."""

    step: int
    rule: str


def find(reward: Series, gap: Series, accuracy: Series, rule: CollapseRule = RULE) -> Collapse | None:
    """The earliest collapse of a run, None where it has none."""
    found = [
        ("reward", reward.steps, _below_best(reward.values, rule.window, rule.drop)),
        ("gap", gap.steps, _sustained(gap.values > rule.gap, rule.window)),
        ("accuracy", accuracy.steps, _dropped(accuracy.values, rule)),
    ]
    held_at = [Collapse(int(steps[held][0]), name) for name, steps, held in found if held.any()]
    return min(held_at, key=lambda collapse: collapse.step, default=None)


def _below_best(values: np.ndarray, window: int, drop: float) -> np.ndarray:
    """Where `window` values from here on all lie `drop` below the best mean of `window` values before."""
    held = np.zeros(len(values), dtype=bool)
    if len(values) < 2 * window:
        return held
    windows = np.lib.stride_tricks.sliding_window_view(values, window)
    best = np.maximum.accumulate(windows.mean(axis=1))[:-window]
    held[window : len(values) - window + 1] = windows[window:].max(axis=1) < best - drop
    return held


def _dropped(values: np.ndarray, rule: CollapseRule) -> np.ndarray:
    """Where evaluations from here on lie `drop` below the best single one before."""
    if len(values) < 2:
        return np.zeros(len(values), dtype=bool)
    best = np.concatenate([[-np.inf], np.maximum.accumulate(values)[:-1]])
    count = rule.evaluations
    held = np.zeros(len(values), dtype=bool)
    for start in range(1, len(values) - count + 1):
        held[start] = bool((values[start : start + count] < best[start] - rule.drop).all())
    return held


def _sustained(beyond: np.ndarray, window: int) -> np.ndarray:
    """Where `window` flags in a row are set from here on."""
    held = np.zeros(len(beyond), dtype=bool)
    if len(beyond) >= window:
        runs = np.lib.stride_tricks.sliding_window_view(beyond, window)
        held[: len(runs)] = runs.all(axis=1)
    return held
