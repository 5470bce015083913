"""A verdict follows its interval, flips with the effect, and is withheld where nothing can be believed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quads.suites import results, verdicts
from quads.suites.metrics import MetricError
from quads.suites.statistics import Interval
from quads.suites.verdicts import Judged, decide
from tests.suites.made_results import ARMS, Made, append, hypothesis, probe_record, write

LEARNED = {"plain": True}
RULES = [
    ("lower", 0.0, (-0.2, -0.1), "supported"),
    ("lower", 0.0, (0.1, 0.2), "refuted"),
    ("lower", 0.0, (-0.1, 0.1), "undecided"),
    ("lower", 0.15, (-0.2, -0.1), "undecided"),
    ("lower", 0.15, (-0.1, 0.1), "refuted"),
    ("higher", 0.0, (0.1, 0.2), "supported"),
    ("higher", 0.0, (-0.2, -0.1), "refuted"),
    ("higher", 0.05, (0.1, 0.2), "supported"),
    ("equal", 0.05, (-0.04, 0.03), "supported"),
    ("equal", 0.05, (0.06, 0.2), "refuted"),
    ("equal", 0.05, (-0.2, -0.06), "refuted"),
    ("equal", 0.05, (-0.2, 0.01), "undecided"),
    ("lower", 0.0, (math.nan, math.nan), "undecided"),
    ("equal", 0.1, (math.nan, math.nan), "undecided"),
]


@pytest.mark.parametrize(("direction", "margin", "ends", "verdict"), RULES)
def test_the_interval_decides(direction: str, margin: float, ends: tuple[float, float], verdict: str) -> None:
    assert decide(direction, margin, Interval(value=sum(ends) / 2, low=ends[0], high=ends[1])) == verdict


@given(st.floats(-1, 1), st.floats(0, 1), st.floats(0, 0.5))
def test_higher_is_lower_of_the_mirror_image(middle: float, half: float, margin: float) -> None:
    found = Interval(value=middle, low=middle - half, high=middle + half)
    mirrored = Interval(value=-middle, low=-found.high, high=-found.low)
    assert decide("higher", margin, found) == decide("lower", margin, mirrored)


def judged(out: Path, arms: dict[str, Made], learned: dict[str, bool | None] = LEARNED, **changes: object) -> Judged:
    wanted = hypothesis(**changes)
    return verdicts.judge(wanted, results.load(write(out, arms, wanted)), learned)


def test_a_verdict_flips_when_the_effect_flips(tmp_path: Path) -> None:
    better = judged(tmp_path / "a", ARMS)
    worse = judged(tmp_path / "b", {**ARMS, "quads": Made(accuracy=0.5), "nvfp4": Made(accuracy=0.9)})
    assert (better.verdict, worse.verdict) == ("supported", "refuted")


def test_without_an_effect_the_verdict_is_open_and_says_what_would_have_been_seen(tmp_path: Path) -> None:
    found = judged(tmp_path, {**ARMS, "nvfp4": Made(accuracy=0.9)})
    assert found.verdict == "undecided" and found.compared
    assert f"{found.compared.interval.mde:.2g} would have been found with 80 % power" in found.why


def test_where_bf16_did_not_learn_no_outcome_is_believed(tmp_path: Path) -> None:
    found = judged(tmp_path, ARMS, {"plain": False})
    assert found.verdict == "undecided" and "BF16 did not learn in plain" in found.why and found.compared


def test_where_nothing_shows_that_bf16_learns_no_outcome_is_believed(tmp_path: Path) -> None:
    found = judged(tmp_path, ARMS, {"plain": None}, metric="run/gap_mean", direction="lower")
    assert found.verdict == "undecided" and "Nothing shows that BF16 learns" in found.why


def test_one_seed_decides_nothing(tmp_path: Path) -> None:
    one = {name: replace(made, seeds=1) for name, made in ARMS.items()}
    found = judged(tmp_path, one)
    assert found.verdict == "undecided" and "One seed" in found.why


@pytest.mark.parametrize("metric", ["outcome/accuracy", "outcome/reward_last", "run/gap_mean"])
def test_two_seeds_decide_nothing_but_show_their_interval_and_three_decide(tmp_path: Path, metric: str) -> None:
    direction = "lower" if metric == "run/gap_mean" else "higher"
    two, three = (judged(tmp_path / str(seeds), _sure(seeds), metric=metric, direction=direction) for seeds in (2, 3))
    assert two.verdict == "undecided" and "2 paired seeds say too little about others" in two.why
    assert two.compared and decide(direction, 0.0, two.compared.interval) == "supported"
    assert three.verdict == "supported"


def _sure(seeds: int) -> dict[str, Made]:
    """Arms whose difference even two seeds' interval shows."""
    far = {"nvfp4": Made(gap=0.2, accuracy=0.1), "quads": Made(gap=1e-4, accuracy=0.95)}
    return {name: replace(made, seeds=seeds) for name, made in {**ARMS, **far}.items()}


def test_emulated_speed_decides_nothing(tmp_path: Path) -> None:
    found = judged(tmp_path, ARMS, metric="throughput/rollout_tokens_per_s", direction="equal", margin=1e9)
    assert found.verdict == "undecided" and "emulated" in found.why


def test_a_missing_arm_is_named(tmp_path: Path) -> None:
    found = judged(tmp_path, ARMS, arm="qat")
    assert found.verdict == "undecided" and "qat has no records in plain yet" in found.why and not found.compared


def test_an_unknown_metric_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(MetricError, match="did you mean 'outcome/accuracy'"):
        judged(tmp_path, ARMS, metric="outcome/accurcy")


def test_the_probe_is_believed_whether_bf16_learned_or_not(tmp_path: Path) -> None:
    wanted = hypothesis(metric="probe/gap_mean", where="start/w4", direction="lower")
    out, rng = write(tmp_path, ARMS, wanted), np.random.default_rng(0)
    for draw in range(6):
        gaps = rng.lognormal(-5, 0.3, size=64)
        append(out / "probe.jsonl", [probe_record("nvfp4", draw, gaps), probe_record("quads", draw, 0.8 * gaps)])
    found = verdicts.judge(wanted, results.load(out), {"plain": False})
    assert found.verdict == "supported" and "over 6 paired draws" in found.why


def test_an_arm_is_judged_against_the_mean_of_two(tmp_path: Path) -> None:
    arms = {"bf16": Made(), "nvfp4": Made(accuracy=0.5), "qat": Made(accuracy=0.85), "quads": Made(accuracy=0.9)}
    most = judged(tmp_path / "a", arms, arm="qat", against="nvfp4 + quads")
    little = judged(tmp_path / "b", {**arms, "qat": Made(accuracy=0.55)}, arm="qat", against="nvfp4 + quads")
    assert (most.verdict, little.verdict) == ("supported", "refuted")
