"""Numbers of a whole comparison out of its records: accuracy with intervals, gap, throughput, an entry an arm."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from quads.compare.records import SCHEMA, Record
from quads.gap import mean_interval

BASELINE = "bf16"
EDGE = 5  # steps at each end that "first" and "last" average over

Numbers = dict[str, Any]


def summarize(runs: list[Record], evals: list[Record]) -> Numbers:
    """Summary of every arm that has records. Intervals are 95 % bootstraps over held-out problems.

    Seeds are averaged problem by problem first, so an interval says what other problems could change, not other seeds.
    """
    names = dict.fromkeys(record["arm"] for record in runs)
    curves = {arm: _curve([record for record in evals if record["arm"] == arm]) for arm in names}
    arms = [arm for arm, curve in curves.items() if curve]
    return {
        "schema": SCHEMA,
        "arms": {arm: _arm(arm, [r for r in runs if r["arm"] == arm], curves) for arm in arms},
    }


def _arm(arm: str, runs: list[Record], curves: dict[str, dict[int, np.ndarray]]) -> Numbers:
    curve = curves[arm]
    first, last = min(curve), max(curve)
    tokens = np.array([record["gap/tokens"] for record in runs])
    numbers: Numbers = {
        "seeds": sorted({record["seed"] for record in runs}),
        "steps": max(record["step"] for record in runs),
        "accuracy/start": _share(curve[first]),
        "accuracy/end": _share(curve[last]),
        "accuracy/gain": _share(curve[last] - curve[first]),
        "gap/tokens": int(tokens.sum()),
        "gap/max": max(record["gap/max"] for record in runs),
        "throughput/rollout_tokens_per_s": float(np.median([r["throughput/rollout_tokens_per_s"] for r in runs])),
        "throughput/step_tokens_per_s": float(np.median([r["throughput/step_tokens_per_s"] for r in runs])),
        "reward/last": _edge_mean(runs, "reward/mean", last=True),
        "gap/mean_first": _edge_mean(runs, "gap/mean", last=False),
        "gap/mean_last": _edge_mean(runs, "gap/mean", last=True),
    }
    for key in ("gap/mean", "gap/k3", "gap/k3_reverse"):  # exact over all tokens
        numbers[key] = float(np.average([record[key] for record in runs], weights=tokens))
    for key in ("gap/p99", "gap/ess"):  # a typical step's
        numbers[key] = float(np.median([record[key] for record in runs]))
    baseline = curves.get(BASELINE, {})
    if arm != BASELINE and last in baseline and len(baseline[last]) == len(curve[last]):
        numbers["accuracy/against_bf16"] = _share(curve[last] - baseline[last])
    return numbers


def learned(summary: Numbers) -> bool | None:
    """Whether BF16's gain is above 0 with its whole interval; None without that arm."""
    baseline = summary["arms"].get(BASELINE)
    return None if baseline is None else bool(baseline["accuracy/gain"]["low"] > 0)


def _curve(evals: list[Record]) -> dict[int, np.ndarray]:
    """Step -> share of seeds that solve each held-out problem, for steps that every seed has reached."""
    by_step: dict[int, list[list[int]]] = defaultdict(list)
    seeds = {record["seed"] for record in evals}
    for record in evals:
        by_step[record["step"]].append([int(digit) for digit in record["eval/correct"]])
    return {step: np.mean(rows, axis=0) for step, rows in sorted(by_step.items()) if len(rows) == len(seeds)}


def _share(values: np.ndarray) -> Numbers:
    low, high = mean_interval(values.astype(float))
    return {"value": float(values.mean()), "low": low, "high": high}


def _edge_mean(runs: list[Record], key: str, *, last: bool) -> float:
    steps = sorted({record["step"] for record in runs})
    chosen = set(steps[-EDGE:] if last else steps[:EDGE])
    return float(np.mean([record[key] for record in runs if record["step"] in chosen]))
