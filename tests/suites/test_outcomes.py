"""Outcomes say what each arm came to, and whether BF16 learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quads.suites import outcomes, results
from quads.suites.outcomes import Outcome
from quads.suites.results import Results
from quads.suites.statistics import Interval
from tests.suites.made_results import ARMS, Made, append, write


def loaded(out: Path, arms: dict[str, Made] = ARMS) -> Results:
    return results.load(write(out, arms))


def outcome(found: Results, arm: str, last_step: int = 60) -> Outcome:
    return outcomes.outcome("plain", arm, found.cells["plain"][arm], last_step)


def test_bf16_that_learns_is_seen_to_learn(tmp_path: Path) -> None:
    found = outcomes.learned("plain", loaded(tmp_path).cells["plain"])
    assert found.learned is True and found.gain.low is not None and found.gain.low > 0.4


def test_bf16_that_does_not_learn_is_seen_not_to(tmp_path: Path) -> None:
    found = outcomes.learned("plain", loaded(tmp_path, {"bf16": Made(start=0.4, accuracy=0.4)}).cells["plain"])
    assert found.learned is False


@pytest.mark.parametrize("arms", [{"quads": Made()}, {"bf16": Made(steps=60)}])
def test_without_bf16_or_a_second_evaluation_nothing_shows_it(tmp_path: Path, arms: dict[str, Made]) -> None:
    out = write(tmp_path, arms)
    path = out / "plain" / "evals.jsonl"
    path.write_text("".join(x for x in path.read_text().splitlines(keepends=True) if '"step": 0,' in x))
    assert outcomes.learned("plain", results.load(out).cells["plain"]).learned is None


def test_an_outcome_has_the_made_numbers(tmp_path: Path) -> None:
    found = outcome(loaded(tmp_path), "nvfp4")
    assert found.seeds == (0, 1, 2, 3) and found.steps == 60 and found.finished == 4 and not found.collapsed
    assert found.gap_mean.low is not None and found.gap_mean.low < 0.02 < (found.gap_mean.high or 0)
    assert found.gap_tokens == 4 * 60 * 1600 and found.rollout_tokens_per_s == 1e4 and found.memory_gib is None


def test_the_gap_of_the_first_and_last_steps_shows_its_growth(tmp_path: Path) -> None:
    found = outcome(loaded(tmp_path, {"bf16": Made(), "qat": Made(gap=0.01, gap_end=0.05)}), "qat")
    assert found.gap_first.high is not None and found.gap_last.low is not None
    assert found.gap_first.high < 0.02 < 0.04 < found.gap_last.low


def test_a_collapse_is_listed_with_seed_step_and_rule(tmp_path: Path) -> None:
    found = outcome(loaded(tmp_path, {"bf16": Made(), "nvfp4": Made(collapse=40, seeds=2)}), "nvfp4")
    # By then the reward has risen to 0.73 of its 0.9: half a point lower is beyond the rule from that very step.
    assert found.collapsed == ({"seed": 0, "step": 40, "rule": "reward"}, {"seed": 1, "step": 40, "rule": "reward"})


def test_runs_that_end_early_are_not_finished(tmp_path: Path) -> None:
    assert outcome(loaded(tmp_path), "quads", last_step=100).finished == 0


def test_a_curve_holds_every_step_and_every_evaluation(tmp_path: Path) -> None:
    found = loaded(tmp_path)
    curve = outcomes.curve("plain", "quads", found.cells["plain"]["quads"])
    assert curve.steps == tuple(range(1, 61)) and len(curve.gap_p99) == 60
    assert curve.accuracy.steps == (0, 10, 20, 30, 40, 50, 60)
    assert all(low <= value <= high for low, value, high in zip(*_ends(curve.accuracy), strict=True))


def _ends(points: outcomes.Points) -> list[list[float]]:
    return [[float(x) for x in part if x is not None] for part in (points.low, points.value, points.high)]


def test_arms_come_in_the_order_of_the_suite(tmp_path: Path) -> None:
    found = loaded(tmp_path, {name: ARMS[name] for name in ("quads", "bf16", "nvfp4")})
    assert list(outcomes.of(found, "plain")) == ["quads", "bf16", "nvfp4"]


def test_a_run_that_failed_counts_as_collapsed_and_as_solving_nothing(tmp_path: Path) -> None:
    out = write(tmp_path, ARMS)
    cut(out / "plain", "nvfp4", seed=1, after=25)
    append(out / "plain" / "failures.jsonl", [{"schema": 1, "arm": "nvfp4", "seed": 1, "step": 26, "failed": "NaN"}])
    found = results.load(out)
    nvfp4 = outcome(found, "nvfp4")
    assert nvfp4.seeds == (0, 1, 2, 3) and nvfp4.steps == 60
    assert {"seed": 1, "step": 26, "rule": "not finite"} in nvfp4.collapsed
    others = [found.cells["plain"]["nvfp4"][seed].evals[-1]["eval/accuracy"] for seed in (0, 2, 3)]
    assert nvfp4.accuracy.value == pytest.approx(sum(others) / 4)
    curve = outcomes.curve("plain", "nvfp4", found.cells["plain"]["nvfp4"])
    assert len(curve.reward) == 60 and curve.accuracy.steps[-1] == 60


def cut(folder: Path, arm: str, seed: int, after: int) -> None:
    """Drop the records of one run that are later than a step."""
    for path in (folder / "runs.jsonl", folder / "evals.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        path.unlink()
        append(path, [r for r in records if not ((r["arm"], r["seed"]) == (arm, seed) and r["step"] > after)])


def test_an_interval_ends_where_the_quantity_does() -> None:
    wide = Interval(value=0.9, low=-0.5, high=2.3, pairs=2)
    assert outcomes.estimate(wide, 0, 1) == outcomes.Estimate(value=0.9, low=0.0, high=1.0)
    assert outcomes.estimate(Interval(value=0.9)) == outcomes.Estimate(value=0.9)
