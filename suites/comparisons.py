"""Paired differences of one metric between two arms: which pairs are shown, and what each is read from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from quads.recipes import Recipe
from quads.suites import metrics
from quads.suites.config import Hypothesis
from quads.suites.results import Results, meet, name_of, recipe_of
from quads.suites.statistics import Interval, Sample, UnpairedError, difference

T = TypeVar("T")
BASELINES = ("bf16", "nvfp4")
RUN_METRICS = (
    "outcome/accuracy",
    "outcome/trainer_accuracy",
    "outcome/reward_last",
    "outcome/collapsed",
    "run/gap_mean",
    "run/gap_p99",
    "run/gap_growth",
    "throughput/rollout_tokens_per_s",
)
PROBE_METRICS = ("probe/gap_mean", "probe/gap_p99", "probe/kl", "probe/router_flips")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What is compared: `arm` at the first place minus the mean of `rivals` at the second."""

    metric: str
    arm: str
    rivals: tuple[str, ...]
    places: tuple[str, str]

    @property
    def where(self) -> str:
        """The place, or both."""
        first, second = self.places
        return first if first == second else f"{first} : {second}"

    @property
    def against(self) -> str:
        """The rivals in one string."""
        return " + ".join(self.rivals)


@dataclass(frozen=True)
class Compared:
    """A pair's difference, the step that it was taken at (0 for the probe) and the seeds left behind."""

    pair: Pair
    interval: Interval
    steps: int = 0
    behind: tuple[int, ...] = ()


def of_hypothesis(hypothesis: Hypothesis) -> Pair:
    """The pair that decides a hypothesis."""
    arm, *rivals = (name_of(name) for name in (hypothesis.arm, *hypothesis.rivals))
    return Pair(metric=hypothesis.metric, arm=arm, rivals=tuple(rivals), places=hypothesis.places)


def compare(results: Results, pair: Pair) -> Compared:
    """The paired difference. UnpairedError says in a sentence what is missing, MetricError names no metric."""
    if pair.metric.startswith("probe/"):
        return _compare_probe(results, pair)
    metric = metrics.run_metric(pair.metric)
    sides = [
        _of(results.cells.get(pair.places[0], {}), pair.arm, pair.places[0]),
        *(_of(results.cells.get(pair.places[1], {}), rival, pair.places[1]) for rival in pair.rivals),
    ]
    met = meet(sides, metric.has)
    if met is None:
        raise UnpairedError(f"{pair.arm} and {pair.against} have no seed and step in common in {pair.where}")
    own, *others = (metric.sample(side, met.seeds, met.step) for side in sides)
    return Compared(pair, difference(own, _mean(others), binary=metric.binary), met.step, met.behind)


def shown(results: Results) -> Iterator[Pair]:
    """Pairs of the comparison tables: every arm against the baselines and its controls, and each hypothesis's pair."""
    pairs = [*_of_cells(results), *_of_probe(results), *map(of_hypothesis, results.suite.hypotheses)]
    yield from dict.fromkeys(pairs)


def controls(arm: str, arms: list[str]) -> list[str]:
    """The arms that differ from `arm` in nothing but a random choice of channels."""
    recipe = recipe_of(arm)
    if recipe is None:
        return []
    others = {name: other for name in arms if name != arm and (other := recipe_of(name))}
    return [name for name, other in others.items() if other.rac_scope == "random" and _alike(recipe, other)]


def _alike(a: Recipe, b: Recipe) -> bool:
    return a.rac_ratio > 0 and a.replace(name="", rac_scope="batch") == b.replace(name="", rac_scope="batch")


def _compare_probe(results: Results, pair: Pair) -> Compared:
    metric = metrics.probe_metric(pair.metric)
    own, *others = (
        metric.sample(_of(results.probe.get(place, {}), arm, place))
        for arm, place in [(pair.arm, pair.places[0]), *((rival, pair.places[1]) for rival in pair.rivals)]
    )
    return Compared(pair, difference(own, _mean(others)))


def _of_cells(results: Results) -> Iterator[Pair]:
    for cell, arms in results.cells.items():
        for metric in RUN_METRICS:
            for arm, rival in _against_baselines(list(arms)):
                yield Pair(metric=metric, arm=arm, rivals=(rival,), places=(cell, cell))


def _of_probe(results: Results) -> Iterator[Pair]:
    for place, arms in results.probe.items():
        for metric in PROBE_METRICS:
            for arm, rival in _against_baselines(list(arms)):
                yield Pair(metric=metric, arm=arm, rivals=(rival,), places=(place, place))


def _against_baselines(arms: list[str]) -> Iterator[tuple[str, str]]:
    for arm in arms:
        baselines = BASELINES[: BASELINES.index(arm)] if arm in BASELINES else BASELINES
        yield from ((arm, rival) for rival in (*baselines, *controls(arm, arms)) if rival in arms)


def _of(arms: dict[str, T], arm: str, place: str) -> T:
    if arm not in arms:
        raise UnpairedError(f"{arm} has no records in {place} yet")
    return arms[arm]


def _mean(samples: list[Sample]) -> Sample:
    shared = set.intersection(*(set(sample) for sample in samples))
    return {group: np.mean([sample[group] for sample in samples], axis=0) for group in shared}
