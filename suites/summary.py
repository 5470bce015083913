"""summary.json: everything that a report, a gate or a reader needs of a suite's folder, finished or not.

The dataclasses below and in quads.suites.outcomes are its schema. Arms are compared at the last step that all their
paired seeds reached; `steps` says which, `noted` what was left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quads.compare.records import Record, write_json
from quads.suites import metrics, noted, outcomes, verdicts
from quads.suites.comparisons import Compared, compare, shown
from quads.suites.outcomes import Curve, Estimate, Learned, Outcome, estimate, finite
from quads.suites.results import Results, load
from quads.suites.statistics import UnpairedError, interval, matrix
from quads.suites.verdicts import Judged

SCHEMA = 1
FILE = "summary.json"
_PROBED = ("gap_mean", "gap_p99", "gap_max", "kl", "router_flips")


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """arm - against with its 95 % interval, the detectable difference and the pairs that it rests on."""

    metric: str
    arm: str
    against: str
    difference: float
    low: float | None
    high: float | None
    mde: float | None
    pairs: int


@dataclass(frozen=True, kw_only=True)
class Comparison(_Difference):
    """arm - against, paired over seeds (and problems), at training step `steps` of a cell."""

    cell: str
    steps: int


@dataclass(frozen=True, kw_only=True)
class ProbeComparison(_Difference):
    """arm - against at a place of the probe, paired over draws (sequences where there is one draw)."""

    where: str


@dataclass(frozen=True, kw_only=True)
class Probed:
    """One arm of the probe at one place, with intervals over draws."""

    policy: str
    outliers: str
    arm: str
    reference: str
    gap_mean: Estimate
    gap_p99: Estimate
    gap_max: Estimate
    kl: Estimate
    router_flips: Estimate
    tokens: int
    draws: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A hypothesis, its verdict and the numbers that decide it (None where nothing was measured)."""

    id: str
    claim: str
    source: str
    metric: str
    arm: str
    against: str
    where: str
    direction: str
    margin: float
    verdict: str
    difference: float | None
    low: float | None
    high: float | None
    mde: float | None
    pairs: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The whole document."""

    schema: int
    suite: str
    title: str
    question: str
    label: str
    identity: str
    settings: dict[str, Any]
    learned: tuple[Learned, ...]
    outcomes: tuple[Outcome, ...]
    comparisons: tuple[Comparison, ...]
    curves: tuple[Curve, ...]
    probe: tuple[Probed, ...]
    probe_comparisons: tuple[ProbeComparison, ...]
    layers: tuple[Record, ...]
    hypotheses: tuple[Verdict, ...]
    noted: tuple[str, ...]


def write(out: Path) -> dict[str, Any]:
    """Summarise the suite's folder `out` into its summary.json; returns the document."""
    document = asdict(summarize(load(out)))
    write_json(out / FILE, document)
    return document


def summarize(results: Results) -> Summary:
    """The summary of what a folder holds so far."""
    suite, compared = results.suite, list(_compared(results))
    learned = tuple(outcomes.learned(cell, arms) for cell, arms in results.cells.items())
    believed = {entry.cell: entry.learned for entry in learned}
    runs = [(cell, arm, of) for cell in results.cells for arm, of in outcomes.of(results, cell).items()]
    last = {cell.name: cell.compare.steps for cell in suite.cells(Path("."))}
    ends = tuple(outcomes.outcome(cell, arm, of, last[cell]) for cell, arm, of in runs)
    return Summary(
        schema=SCHEMA,
        suite=suite.name,
        title=suite.title,
        question=suite.question,
        label=results.label,
        identity=results.identity,
        settings=dict(suite.settings),
        learned=learned,
        outcomes=ends,
        comparisons=tuple(_comparison(c) for c in compared if c.steps),
        curves=tuple(outcomes.curve(cell, arm, of) for cell, arm, of in runs),
        probe=tuple(_probed(results)),
        probe_comparisons=tuple(_probe_comparison(c) for c in compared if c.pair.metric.startswith("probe/")),
        layers=tuple(_layers(results.layers)),
        hypotheses=tuple(_verdict(verdicts.judge(h, results, believed)) for h in suite.hypotheses),
        noted=tuple(noted.lines(results, ends, last, compared)),
    )


def _compared(results: Results) -> Iterable[Compared]:
    for pair in shown(results):
        try:
            yield compare(results, pair)
        except UnpairedError:
            continue  # not measured yet; a hypothesis about it says so


def _numbers(compared: Compared) -> dict[str, Any]:
    found = compared.interval
    return {
        "metric": compared.pair.metric,
        "arm": compared.pair.arm,
        "against": compared.pair.against,
        "difference": found.value,
        "low": finite(found.low),
        "high": finite(found.high),
        "mde": finite(found.mde),
        "pairs": found.pairs,
    }


def _comparison(compared: Compared) -> Comparison:
    return Comparison(cell=compared.pair.where, steps=compared.steps, **_numbers(compared))


def _probe_comparison(compared: Compared) -> ProbeComparison:
    return ProbeComparison(where=compared.pair.where, **_numbers(compared))


def _probed(results: Results) -> Iterable[Probed]:
    for arms in results.probe.values():
        for arm, draws in arms.items():
            first = next(iter(draws.values()))
            yield Probed(
                policy=first["policy"],
                outliers=first["outliers"],
                arm=arm,
                reference=first["reference"],
                tokens=sum(record["probe/tokens"] for record in draws.values()),
                draws=len(draws),
                **{name: _estimated(f"probe/{name}", draws) for name in _PROBED},
            )


def _estimated(metric: str, draws: dict[int, Record]) -> Estimate:
    sample = metrics.probe_metric(metric).sample(draws)
    return estimate(interval(matrix(sample)), 0) if sample else Estimate(value=None)


def _layers(records: tuple[Record, ...]) -> Iterable[Record]:
    """Attribution records averaged over draws."""
    groups: dict[tuple[str, str, int], list[Record]] = defaultdict(list)
    for record in records:
        groups[record["policy"], record["outliers"], record["layer"]].append(record)
    for (policy, outliers, layer), drawn in groups.items():
        keys = [key for key, value in drawn[0].items() if isinstance(value, float)]
        means = {key: float(np.mean([record[key] for record in drawn])) for key in keys}
        yield {"policy": policy, "outliers": outliers, "layer": layer, "draws": len(drawn), **means}


def _verdict(judged: Judged) -> Verdict:
    hypothesis, found = judged.hypothesis, judged.compared.interval if judged.compared else None
    named = ("id", "claim", "source", "metric", "arm", "against", "where", "direction", "margin")
    return Verdict(
        **{name: getattr(hypothesis, name) for name in named},
        verdict=judged.verdict,
        why=judged.why,
        difference=found.value if found else None,
        low=finite(found.low) if found else None,
        high=finite(found.high) if found else None,
        mde=finite(found.mde) if found else None,
        pairs=found.pairs if found else 0,
    )
