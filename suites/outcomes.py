"""What each arm of each cell came to: outcomes with intervals, learning curves, and whether BF16 learned."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quads.compare.records import Record
from quads.suites import metrics
from quads.suites.metrics import column, fifth, weighted
from quads.suites.results import Arms, Meeting, Results, Run, meet, name_of
from quads.suites.statistics import Interval, Sample, interval, matrix

BASELINE = "bf16"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its 95 % interval; None where it is not known."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Learned:
    """BF16's held-out accuracy at its last evaluation minus at its start; learned: the whole interval is above 0."""

    cell: str
    gain: Estimate
    learned: bool | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One arm of one cell over its seeds, at the last step that they all reached.

    finished: runs at the suite's last step. gap_* but gap_max, gap_tokens: means over seeds, with intervals over
    seeds; gap_first, gap_last: mean gap of the first and last fifth of the steps. k3, ess: of the tokens; median step.
    """

    cell: str
    arm: str
    seeds: tuple[int, ...]
    steps: int
    finished: int
    accuracy: Estimate
    trainer_accuracy: Estimate
    reward_last: Estimate
    gap_mean: Estimate
    gap_p99: Estimate
    gap_max: float | None
    k3: float | None
    ess: float | None
    gap_tokens: int
    gap_first: Estimate
    gap_last: Estimate
    collapsed: tuple[dict[str, Any], ...]
    rollout_tokens_per_s: float | None
    step_tokens_per_s: float | None
    memory_gib: float | None


@dataclass(frozen=True, kw_only=True)
class Points:
    """Estimates at steps."""

    steps: tuple[int, ...] = ()
    value: tuple[float | None, ...] = ()
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One arm of one cell over the training steps, mean over seeds; accuracy at the evaluated steps."""

    cell: str
    arm: str
    steps: tuple[int, ...] = ()
    accuracy: Points = field(default_factory=Points)
    reward: tuple[float, ...] = ()
    gap_mean: tuple[float, ...] = ()
    gap_p99: tuple[float, ...] = ()
    gap_max: tuple[float, ...] = ()


def estimate(found: Interval, least: float = -math.inf, most: float = math.inf) -> Estimate:
    """The interval as JSON can hold it, cut to what the quantity can be."""
    low, high = (None if math.isnan(end) else float(np.clip(end, least, most)) for end in (found.low, found.high))
    return Estimate(value=finite(found.value), low=low, high=high)


def finite(value: float) -> float | None:
    """None for NaN and infinities, which JSON has no word for."""
    return float(value) if np.isfinite(value) else None


def learned(cell: str, arms: Arms) -> Learned:
    """Whether BF16 learned in `cell`; None without the arm or with its start as the only evaluation."""
    runs = arms.get(BASELINE, {})
    metric = metrics.run_metric("outcome/accuracy")
    met = meet([runs], metric.has) if runs else None
    if met is None or met.step == 0 or any(0 not in runs[seed].evaluated() for seed in met.seeds):
        return Learned(cell=cell, gain=Estimate(value=None), learned=None)
    end, start = (metric.sample(runs, met.seeds, step) for step in (met.step, 0))
    gain = interval(matrix({seed: end[seed] - start[seed] for seed in met.seeds}))
    return Learned(cell=cell, gain=estimate(gain), learned=bool(gain.low > 0))


def outcome(cell: str, arm: str, runs: dict[int, Run], last_step: int) -> Outcome:
    """Outcome of one arm whose complete runs have `last_step` steps."""
    met = meet([runs], Run.trained) or Meeting((0,), tuple(runs), ())
    cut = {seed: runs[seed].until(met.step) for seed in met.seeds}
    records = tuple(record for run in cut.values() for record in run.steps)
    return Outcome(
        cell=cell,
        arm=arm,
        seeds=met.seeds,
        steps=met.step,
        finished=sum(last_step in run.trained() for run in runs.values()),
        accuracy=_read(runs, "outcome/accuracy"),
        trainer_accuracy=_read(runs, "outcome/trainer_accuracy"),
        reward_last=_read(runs, "outcome/reward_last"),
        gap_mean=_read(runs, "run/gap_mean"),
        gap_p99=_read(runs, "run/gap_p99"),
        gap_max=max((record["gap/max"] for record in records), default=None),
        k3=weighted(records, "gap/k3") if records else None,
        ess=_median(records, "gap/ess"),
        gap_tokens=int(sum(record["gap/tokens"] for record in records)),
        gap_first=_edge(cut, last=False),
        gap_last=_edge(cut, last=True),
        collapsed=tuple(_collapses(runs)),
        rollout_tokens_per_s=_median(records, "throughput/rollout_tokens_per_s"),
        step_tokens_per_s=_median(records, "throughput/step_tokens_per_s"),
        memory_gib=max((record["memory/peak_gib"] for record in records if "memory/peak_gib" in record), default=None),
    )


def curve(cell: str, arm: str, runs: dict[int, Run]) -> Curve:
    """Curves over the steps that every run of the arm reached that was not left behind; a failed run ends earlier."""
    met = meet([runs], Run.trained)
    if met is None:
        return Curve(cell=cell, arm=arm, accuracy=_accuracy_curve(runs))
    at: dict[int, list[Record]] = defaultdict(list)
    for seed in met.seeds:
        for record in runs[seed].until(met.step).steps:
            at[record["step"]].append(record)
    steps = sorted(at)
    means = {name: tuple(float(column(at[step], key).mean()) for step in steps) for name, key in _CURVES.items()}
    return Curve(cell=cell, arm=arm, steps=tuple(steps), accuracy=_accuracy_curve(runs), **means)


def of(results: Results, cell: str) -> dict[str, dict[int, Run]]:
    """Arms of a cell in the suite's order."""
    order = list(results.cells[cell])
    named = [arm for arm in map(name_of, results.suite.arms) if arm in order]
    return {arm: results.cells[cell][arm] for arm in dict.fromkeys([*named, *order])}


_CURVES = {"reward": "reward/mean", "gap_mean": "gap/mean", "gap_p99": "gap/p99", "gap_max": "gap/max"}


def _accuracy_curve(runs: dict[int, Run]) -> Points:
    metric = metrics.run_metric("outcome/accuracy")
    met = meet([runs], metric.has)
    if met is None:
        return Points()
    points = [estimate(interval(matrix(metric.sample(runs, met.seeds, step))), 0, 1) for step in met.steps]
    return Points(
        steps=met.steps,
        value=tuple(point.value for point in points),
        low=tuple(point.low for point in points),
        high=tuple(point.high for point in points),
    )


def _read(runs: dict[int, Run], name: str) -> Estimate:
    metric = metrics.run_metric(name)
    met = meet([runs], metric.has)
    sample = metric.sample(runs, met.seeds, met.step) if met else {}
    most = 1.0 if name.startswith("outcome/") else math.inf
    return estimate(interval(matrix(sample)), 0, most) if sample else Estimate(value=None)


def _edge(cut: dict[int, Run], *, last: bool) -> Estimate:
    values: Sample = {
        seed: np.array([fifth(run.steps, "gap/mean", last=last)]) for seed, run in cut.items() if run.steps
    }
    return estimate(interval(matrix(values)), 0) if values else Estimate(value=None)


def _median(records: Sequence[Record], key: str) -> float | None:
    return float(np.median(column(records, key))) if records else None


def _collapses(runs: dict[int, Run]) -> list[dict[str, Any]]:
    found = [(seed, metrics.collapsed(run)) for seed, run in runs.items()]
    return [{"seed": seed, "step": event.step, "rule": event.rule} for seed, event in found if event]
