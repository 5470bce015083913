"""A verdict for each hypothesis, from the interval of its paired difference and whether BF16 learned at all.

lower: supported where the whole interval lies below -margin, refuted where it lies above it, else undecided; higher is
the mirror image. equal: supported where the interval lies inside +-margin, refuted where it lies wholly outside.
What training led to is believed only in a cell in which BF16 learned, speeds only where the numerics are not emulated,
and nothing of fewer seeds than `LEAST_SEEDS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quads.suites import metrics
from quads.suites.comparisons import Compared, compare, of_hypothesis
from quads.suites.config import Hypothesis
from quads.suites.results import Results
from quads.suites.statistics import Interval, UnpairedError

SUPPORTED, REFUTED, UNDECIDED = "supported", "refuted", "undecided"
LEAST_SEEDS = 3  # simulated with effects of seeds: over two seeds and 4,096 problems 95 % intervals cover 0.88
_TRAINED = ("outcome/", "run/")  # metrics that mean nothing where BF16 does not learn

Learned = Mapping[str, bool | None]  # cell -> whether BF16 learned there; None where nothing shows it


@dataclass(frozen=True)
class Judged:
    """A hypothesis with its verdict, the difference that decides it (None without one) and one sentence of why."""

    hypothesis: Hypothesis
    verdict: str
    why: str
    compared: Compared | None = None


def judge(hypothesis: Hypothesis, results: Results, learned: Learned) -> Judged:
    """The verdict on one hypothesis as the records stand. MetricError for an unknown metric."""
    metrics.check(hypothesis.metric)
    try:
        compared = compare(results, of_hypothesis(hypothesis))
    except UnpairedError as error:
        return Judged(hypothesis, UNDECIDED, f"Not measured: {error}.")
    doubt = _doubt(hypothesis, results, learned, compared.interval)
    if doubt:
        return Judged(hypothesis, UNDECIDED, doubt, compared)
    verdict = decide(hypothesis.direction, hypothesis.margin, compared.interval)
    return Judged(hypothesis, verdict, _why(hypothesis, verdict, compared), compared)


def decide(direction: str, margin: float, interval: Interval) -> str:
    """supported, refuted or undecided; an interval that is not known decides nothing."""
    low, high = interval.low, interval.high
    if direction == "higher":
        low, high = -high, -low
    if direction == "equal":
        holds, fails = -margin < low and high < margin, low > margin or high < -margin
    else:
        holds, fails = high < -margin, low > -margin
    return SUPPORTED if holds else REFUTED if fails else UNDECIDED


def _doubt(hypothesis: Hypothesis, results: Results, learned: Learned, interval: Interval) -> str:
    """Why no verdict can be given whatever the interval says; empty where nothing stands against one."""
    if hypothesis.metric.startswith("throughput/") and results.suite.settings.get("engine", "transformers") != "vllm":
        return "The rollout's numerics were emulated: their speed says nothing about FP4 hardware."
    if hypothesis.metric.startswith("probe/"):
        return ""
    for cell in hypothesis.places if hypothesis.metric.startswith(_TRAINED) else ():
        if learned.get(cell) is None:
            return f"Nothing shows that BF16 learns in {cell}: it was not evaluated at its start and later."
        if not learned[cell]:
            return f"BF16 did not learn in {cell}, so no arm's outcome there says anything about its numerics."
    if interval.pairs < LEAST_SEEDS:
        seeds = "One seed says" if interval.pairs == 1 else f"{interval.pairs} paired seeds say"
        return f"{seeds} too little about others: a verdict needs at least {LEAST_SEEDS}."
    return ""


_LIES = {
    ("lower", SUPPORTED): "lies wholly below {bound}",
    ("lower", REFUTED): "lies wholly above {bound}",
    ("higher", SUPPORTED): "lies wholly above {bound}",
    ("higher", REFUTED): "lies wholly below {bound}",
    ("lower", UNDECIDED): "reaches across {bound}",
    ("higher", UNDECIDED): "reaches across {bound}",
    ("equal", SUPPORTED): "lies within {bound}",
    ("equal", REFUTED): "lies wholly outside {bound}",
    ("equal", UNDECIDED): "reaches across an end of {bound}",
}


def _why(hypothesis: Hypothesis, verdict: str, compared: Compared) -> str:
    pair, interval = compared.pair, compared.interval
    margin = hypothesis.margin * (-1 if hypothesis.direction == "lower" else 1) + 0.0  # no -0
    bound = f"±{margin:g}" if hypothesis.direction == "equal" else f"{margin:g}"
    numbers = f"{interval.value:+.3g} [{interval.low:+.3g}, {interval.high:+.3g}]"
    units = "draws" if pair.metric.startswith("probe/") else "seeds"
    pairs = f"{interval.pairs} paired {units if interval.pairs > 1 else units[:-1]}"
    at = f" at step {compared.steps}" if compared.steps else ""
    power = f"; {interval.mde:.2g} would have been found with 80 % power" if verdict == UNDECIDED else ""
    what = _LIES[hypothesis.direction, verdict].format(bound=bound)
    return f"{pair.arm} − {pair.against} is {numbers} over {pairs}{at}, which {what}{power}."
