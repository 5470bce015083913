"""The metrics by name: what each reads from the records of one run, or of one draw of the probe.

Names: `probe/...` teacher-forced on fixed policies and tokens (primary); `run/...` the gap of the tokens that training
sampled; `outcome/...` what training led to; `throughput/...` speed. All run metrics take the steps 1 to a given one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from quads.compare.records import Record
from quads.suites import collapse
from quads.suites.collapse import Collapse, Series
from quads.suites.results import Run
from quads.suites.statistics import Sample

T = TypeVar("T")
FIFTHS = 5  # "first" and "last" are a fifth of the steps

Read = Callable[[Run], np.ndarray]


class MetricError(ValueError):
    """A metric that is not known; the message names the nearest."""


@dataclass(frozen=True, kw_only=True)
class RunMetric:
    """read: values of a run cut at the step in question, one or one a held-out problem.

    evaluated: it is read at a step that has an evaluation. better: "lower" or "higher". binary: 0 or 1 a run.
    """

    name: str
    read: Read
    better: str
    evaluated: bool = False
    binary: bool = False

    def has(self, run: Run) -> frozenset[int]:
        """Steps at which the metric can be read."""
        return run.evaluated() if self.evaluated else run.trained()

    def sample(self, runs: dict[int, Run], seeds: tuple[int, ...], step: int) -> Sample:
        """Seed -> values at `step`; a seed whose run failed before its first record has none."""
        cut = {seed: runs[seed].until(step) for seed in seeds}
        return {seed: self.read(run) for seed, run in cut.items() if (run.evals if self.evaluated else run.steps)}


@dataclass(frozen=True, kw_only=True)
class ProbeMetric:
    """key: of the probe's records; by_sequence: the key of its values a sequence, which stand in for a single draw."""

    name: str
    key: str
    better: str = "lower"
    by_sequence: str = ""
    log: bool = False

    def sample(self, draws: dict[int, Record]) -> Sample:
        """Draw -> one value; of a single draw a value a sequence, where the record has them.

        Sequences of a draw share its random channels and are no more independent than that: draws are the groups.
        """
        if len(draws) == 1 and self.by_sequence:
            ((draw, record),) = draws.items()
            return {draw: np.array(record[self.by_sequence], dtype=np.float64)}
        read = {draw: record[self.key] for draw, record in draws.items() if self.key in record}
        values = {draw: np.array([value], dtype=np.float64) for draw, value in read.items()}
        return {draw: np.log(value) for draw, value in values.items()} if self.log else values


def run_metric(name: str) -> RunMetric:
    """A metric of training runs; MetricError for an unknown name."""
    return _known(name, RUN)


def probe_metric(name: str) -> ProbeMetric:
    """A metric of the probe; MetricError for an unknown name."""
    return _known(name, PROBE)


def check(name: str) -> None:
    """MetricError for a name that is neither."""
    _known(name, {**RUN, **PROBE})


def fifth(records: Sequence[Record], key: str, *, last: bool) -> float:
    """Mean of `key` over the last or first fifth of the steps."""
    count = max(1, len(records) // FIFTHS)
    return float(np.mean(column(records[-count:] if last else records[:count], key)))


def column(records: Sequence[Record], key: str) -> np.ndarray:
    """One key of all records, float64."""
    return np.array([record[key] for record in records], dtype=np.float64)


def collapsed(run: Run) -> Collapse | None:
    """Where the run collapsed by the stated rule (quads.suites.collapse), or stopped being finite."""
    steps, evals = column(run.steps, "step"), column(run.evals, "step")
    reward, gap = (Series(steps, column(run.steps, key)) for key in ("reward/mean", "gap/mean"))
    found = collapse.find(reward, gap, Series(evals, column(run.evals, "eval/accuracy")))
    return found or (Collapse(run.failure["step"], "not finite") if run.failure else None)


def digits(record: Record, key: str) -> np.ndarray:
    """0 or 1 a held-out problem, float64, of a record's string of digits."""
    return np.frombuffer(record[key].encode(), dtype=np.uint8).astype(np.float64) - ord("0")


def growth(run: Run) -> float:
    """Mean gap of the last fifth of the steps minus that of the first."""
    return fifth(run.steps, "gap/mean", last=True) - fifth(run.steps, "gap/mean", last=False)


def weighted(records: Sequence[Record], key: str) -> float:
    """Mean of `key` over all tokens of the steps."""
    return float(np.average(column(records, key), weights=column(records, "gap/tokens")))


def _trainer_accuracy(run: Run) -> np.ndarray:
    last = run.evals[-1]
    if "eval/trainer_correct" in last:
        return digits(last, "eval/trainer_correct")
    return np.array([last["eval/trainer_accuracy"]])


def _median(key: str) -> Read:
    return lambda run: np.array([np.median(column(run.steps, key))])


def _one(value: Callable[[Run], float]) -> Read:
    return lambda run: np.array([value(run)])


def _known(name: str, table: Mapping[str, T]) -> T:
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else f" (known: {', '.join(table)})"
        raise MetricError(f"no metric '{name}'{hint}")
    return table[name]


def _by_name(*metrics: T) -> dict[str, T]:
    return {metric.name: metric for metric in metrics}  # type: ignore[attr-defined]


RUN = _by_name(
    RunMetric(
        name="outcome/accuracy",
        read=lambda run: digits(run.evals[-1], "eval/correct"),
        better="higher",
        evaluated=True,
    ),
    RunMetric(name="outcome/trainer_accuracy", read=_trainer_accuracy, better="higher", evaluated=True),
    RunMetric(
        name="outcome/reward_last",
        read=_one(lambda run: fifth(run.steps, "reward/mean", last=True)),
        better="higher",
    ),
    RunMetric(name="outcome/collapsed", read=_one(lambda run: collapsed(run) is not None), better="lower", binary=True),
    RunMetric(name="run/gap_mean", read=_one(lambda run: weighted(run.steps, "gap/mean")), better="lower"),
    RunMetric(
        name="run/log_gap_mean",
        read=_one(lambda run: float(np.log(weighted(run.steps, "gap/mean")))),
        better="lower",
    ),
    RunMetric(name="run/gap_p99", read=_median("gap/p99"), better="lower"),
    RunMetric(name="run/gap_max", read=_median("gap/max"), better="lower"),
    RunMetric(name="run/gap_growth", read=_one(growth), better="lower"),
    RunMetric(name="throughput/rollout_tokens_per_s", read=_median("throughput/rollout_tokens_per_s"), better="higher"),
    RunMetric(name="throughput/step_tokens_per_s", read=_median("throughput/step_tokens_per_s"), better="higher"),
)
PROBE = _by_name(
    ProbeMetric(name="probe/gap_mean", key="probe/gap_mean", by_sequence="probe/by_sequence"),
    ProbeMetric(name="probe/log_gap_mean", key="probe/gap_mean", log=True),
    ProbeMetric(name="probe/gap_p99", key="probe/gap_p99"),
    ProbeMetric(name="probe/gap_max", key="probe/gap_max"),
    ProbeMetric(name="probe/kl", key="probe/kl", by_sequence="probe/kl_by_sequence"),
    ProbeMetric(name="probe/k3", key="probe/k3"),
    ProbeMetric(name="probe/router_flips", key="probe/router_flips"),
)
