"""Records of a made-up comparison, for summaries and reports."""

from __future__ import annotations

from typing import Any

import numpy as np

from quads.compare.records import Record

PROBLEMS = 200
ARMS = {"bf16": (1e-6, 0.9), "nvfp4": (1e-2, 0.5), "quads": (4e-3, 0.8)}  # gap, final accuracy


def step_record(arm: str, seed: int, step: int, gap: float, tokens: int = 100) -> Record:
    return {
        **{"schema": 1, "arm": arm, "seed": seed, "step": step, "reward/mean": 0.4 + 0.01 * step},
        **{"gap/tokens": tokens, "gap/mean": gap, "gap/p99": 5 * gap, "gap/max": 20 * gap, "gap/k3": gap**2},
        **{"gap/k3_reverse": 2 * gap**2, "gap/ess": 1 - gap},
        **{"throughput/rollout_tokens_per_s": 1000.0, "throughput/step_tokens_per_s": 500.0},
    }


def evaluation(arm: str, seed: int, step: int, solved: int) -> Record:
    correct = "1" * solved + "0" * (PROBLEMS - solved)
    return {"arm": arm, "seed": seed, "step": step, "eval/accuracy": solved / PROBLEMS, "eval/correct": correct}


def comparison(seeds: tuple[int, ...] = (0, 1), steps: int = 12) -> tuple[list[Record], list[Record]]:
    rng = np.random.default_rng(0)
    runs, evals = [], []
    for arm, (gap, accuracy) in ARMS.items():
        for seed in seeds:
            factors = rng.lognormal(0.0, 0.2, steps)
            runs += [step_record(arm, seed, step + 1, gap * float(factors[step])) for step in range(steps)]
            points = np.linspace(0.4, accuracy, 4)
            evals += [evaluation(arm, seed, 4 * i, round(PROBLEMS * p)) for i, p in enumerate(points)]
    return runs, evals


STAMP: dict[str, Any] = {"time_utc": "2026-01-01T00:00:00+00:00", "versions": {"torch": "2.13.0"}, "gpu": None}
SETTINGS: dict[str, Any] = {"shared": {"task": "chain_sum", "lr": 1e-4}, "seeds": [0, 1], "recipes": {}}
