"""A made-up result folder of a suite, in the files and fields that a real run writes, with effects that are known."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quads.compare.records import Record, write_json
from quads.suites.config import Hypothesis, Suite, Variant

PROBLEMS, EVERY = 200, 10
CPU_STAMP: dict[str, Any] = {"gpu": None, "time_utc": "2026-01-01T00:00:00+00:00", "command": "made"}


@dataclass(frozen=True, kw_only=True)
class Made:
    """One arm: accuracy at its start and end, mean gap, and a step at which its reward collapses (0: none)."""

    accuracy: float = 0.9
    start: float = 0.4
    gap: float = 0.01
    gap_end: float | None = None
    collapse: int = 0
    seeds: int = 4
    steps: int = 60


ARMS = {"bf16": Made(gap=1e-6), "nvfp4": Made(gap=0.02, accuracy=0.6), "quads": Made(gap=0.01)}


def hypothesis(**changes: Any) -> Hypothesis:
    """quads - nvfp4 in accuracy, expected higher."""
    given = {"id": "h", "claim": "c", "metric": "outcome/accuracy", "arm": "quads", "against": "nvfp4"}
    return Hypothesis(**{**given, "where": "plain", "direction": "higher", **changes})


def suite(arms: dict[str, Made], *hypotheses: Hypothesis, **changes: Any) -> Suite:
    """A suite that ran `arms`, each for the first arm's steps."""
    first = next(iter(arms.values()))
    made = Suite(
        name="made",
        title="t",
        question="q",
        arms=tuple(arms),
        seeds=first.seeds,
        settings={"steps": first.steps, "eval_every": EVERY},
        variants=(Variant(name="plain"),),
        hypotheses=hypotheses or (hypothesis(),),
    )
    return replace(made, **changes)


def write(out: Path, arms: dict[str, Made] = ARMS, *hypotheses: Hypothesis, noise: int = 0, **changes: Any) -> Path:
    """Write the folder; `noise` draws other seeds and problems with the same effects."""
    made = suite(arms, *hypotheses, **changes)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "suite.json", {"suite": made.to_dict(), "identity": made.identity})
    write_json(out / "stamp.json", CPU_STAMP)
    for cell in made.cells(out):
        (out / cell.name).mkdir(exist_ok=True)
        for arm, of in arms.items():
            for seed in range(of.seeds):
                _write_run(out / cell.name, arm, of, seed, noise)
    return out


def _write_run(folder: Path, arm: str, of: Made, seed: int, noise: int) -> None:
    own = np.random.default_rng([noise, seed, *arm.encode()])
    problems = np.random.default_rng([noise, 7]).random(PROBLEMS)  # how hard each is, the same for all arms and seeds
    luck = 0.02 * np.random.default_rng([noise, seed]).standard_normal()  # of a seed, shared by arms
    runs, evals = [], []
    for step in range(of.steps + 1):
        share = step / of.steps
        level = of.start + (of.accuracy + luck + 0.01 * own.standard_normal() - of.start) * share
        if of.collapse and step >= of.collapse:
            level -= 0.5
        if step:
            runs.append(step_record(arm, seed, step, level + 0.02 * own.standard_normal(), _gap(of, share, own)))
        if step % EVERY == 0 or step == of.steps:
            evals.append(eval_record(arm, seed, step, 0.9 * problems + 0.1 * own.random(PROBLEMS) < level))
    append(folder / "runs.jsonl", runs)
    append(folder / "evals.jsonl", evals)


def _gap(of: Made, share: float, rng: np.random.Generator) -> float:
    end = of.gap if of.gap_end is None else of.gap_end
    return float((of.gap + (end - of.gap) * share) * np.exp(0.1 * rng.standard_normal()))


def step_record(arm: str, seed: int, step: int, reward: float, gap: float) -> Record:
    """The fields of a training step that summaries read."""
    return {
        **{"schema": 1, "arm": arm, "seed": seed, "step": step, "reward/mean": float(np.clip(reward, 0, 1))},
        **{"gap/tokens": 1600, "gap/mean": gap, "gap/p99": 10 * gap, "gap/max": 50 * gap},
        **{"gap/k3": gap**2, "gap/ess": 1 - gap},
        **{"throughput/rollout_tokens_per_s": 1e4, "throughput/step_tokens_per_s": 1e3},
    }


def eval_record(arm: str, seed: int, step: int, solved: np.ndarray) -> Record:
    """The fields of an evaluation."""
    share = float(solved.mean())
    return {
        **{"schema": 1, "arm": arm, "seed": seed, "step": step, "eval/accuracy": share, "eval/trainer_accuracy": share},
        **{"eval/problems": len(solved), "eval/correct": "".join(str(int(hit)) for hit in solved)},
    }


def probe_record(arm: str, draw: int, gaps: np.ndarray, **changes: Any) -> Record:
    """One record of the probe: `gaps` are the means of its sequences."""
    return {
        **{"schema": 1, "policy": "start", "outliers": "", "arm": arm, "reference": "w4", "draw": draw},
        **{"probe/gap_mean": float(gaps.mean()), "probe/gap_p50": 0.0, "probe/gap_p99": 10 * float(gaps.mean())},
        **{"probe/gap_max": 1.0, "probe/kl": float(gaps.mean()) ** 2, "probe/k3": float(gaps.mean()) ** 2},
        **{"probe/router_flips": 0.01, "probe/tokens": 5 * len(gaps), "probe/by_sequence": gaps.tolist()},
        **{"probe/kl_by_sequence": (gaps**2).tolist(), "label": "emulated (CPU)", **changes},
    }


def append(path: Path, records: list[Record]) -> None:
    """Add whole lines at once (Records.append syncs every one)."""
    with path.open("a") as handle:
        handle.writelines(json.dumps(record) + "\n" for record in records)
