"""Comparisons pair what belongs together and say what is missing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quads.suites import results
from quads.suites.comparisons import Pair, compare, controls, of_hypothesis, shown
from quads.suites.config import Variant
from quads.suites.statistics import UnpairedError
from tests.suites.made_results import ARMS, Made, append, hypothesis, probe_record, write


def pair(metric: str = "outcome/accuracy", arm: str = "quads", *rivals: str, where: str = "plain") -> Pair:
    return Pair(metric=metric, arm=arm, rivals=rivals or ("nvfp4",), places=(where, where))


def test_a_known_difference_lies_in_its_interval(tmp_path: Path) -> None:
    found = compare(results.load(write(tmp_path, ARMS)), pair()).interval
    assert found.low < 0.3 / 0.9 < found.high and found.pairs == 4  # solved share: level / 0.9 of uniform problems


def test_an_unfinished_arm_is_compared_where_it_is(tmp_path: Path) -> None:
    out = write(tmp_path, {**ARMS, "quads": replace(ARMS["quads"], steps=60)})
    path = out / "plain" / "evals.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not ('"quads"' in line and '"step": 60' in line)))
    assert compare(results.load(out), pair()).steps == 50


def test_a_seed_left_behind_is_named(tmp_path: Path) -> None:
    out = write(tmp_path, ARMS)
    path = out / "plain" / "evals.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    late = [f'"step": {step}' for step in (30, 40, 50, 60)]
    kept = [x for x in lines if not ('"quads"' in x and '"seed": 3' in x and any(f"{step}," in x for step in late))]
    path.write_text("".join(kept))
    found = compare(results.load(out), pair())
    assert (found.steps, found.interval.pairs, found.behind) == (60, 3, (3,))


def test_two_cells_can_be_compared(tmp_path: Path) -> None:
    variants = (Variant(name="a"), Variant(name="b", settings={"lr": 1e-3}))
    out = write(tmp_path, ARMS, hypothesis(where="a"), variants=variants)
    found = compare(results.load(out), Pair(metric="run/gap_mean", arm="quads", rivals=("nvfp4",), places=("a", "b")))
    assert found.interval.high < 0 and found.pair.where == "a : b"


@pytest.mark.parametrize(
    ("wanted", "says"),
    [(pair(arm="qat"), "qat has no records in plain yet"), (pair(where="other"), "quads has no records in other yet")],
)
def test_what_is_missing_is_said(tmp_path: Path, wanted: Pair, says: str) -> None:
    with pytest.raises(UnpairedError, match=says):
        compare(results.load(write(tmp_path, ARMS)), wanted)


def test_arms_of_other_problems_are_refused(tmp_path: Path) -> None:
    out = write(tmp_path, ARMS)
    path = out / "plain" / "evals.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    fewer = [
        re.sub(r'("eval/correct": ".)', '"eval/correct": "', line) if '"quads"' in line else line for line in lines
    ]
    path.write_text("".join(fewer))
    with pytest.raises(UnpairedError, match="not of the same units"):
        compare(results.load(out), pair())


def test_probe_records_pair_by_draw(tmp_path: Path) -> None:
    out, rng = write(tmp_path, ARMS), np.random.default_rng(0)
    for draw in range(4):
        gaps = rng.lognormal(-5, 0.5, size=50)
        append(out / "probe.jsonl", [probe_record("nvfp4", draw, gaps), probe_record("quads", draw, gaps / 2)])
    found = compare(results.load(out), pair("probe/gap_mean", where="start/w4")).interval
    assert found.high < 0 and found.pairs == 4
    in_logs = compare(results.load(out), pair("probe/log_gap_mean", where="start/w4")).interval
    assert [in_logs.low, in_logs.value, in_logs.high] == pytest.approx([np.log(0.5)] * 3)


def test_every_arm_is_shown_against_its_baselines_and_every_hypothesis_its_pair(tmp_path: Path) -> None:
    wanted = hypothesis(arm="quads", against="bf16 + nvfp4")
    pairs = list(shown(results.load(write(tmp_path, ARMS, wanted))))
    of_accuracy = {(p.arm, p.against) for p in pairs if p.metric == "outcome/accuracy"}
    expected = {("nvfp4", "bf16"), ("quads", "bf16"), ("quads", "nvfp4"), ("quads", "bf16 + nvfp4")}
    assert of_accuracy == expected and of_hypothesis(wanted) in pairs


def test_a_random_control_has_the_same_ratio_and_trainer() -> None:
    arms = ["rac", "quads", "quads-random", "quads:rac_ratio=0.25", "quads-random:rac_ratio=0.25", "w16a4"]
    assert controls("quads", arms) == ["quads-random"]
    assert controls("quads:rac_ratio=0.25", arms) == ["quads-random:rac_ratio=0.25"]
    assert controls("quads:rac_scope=token", arms) == ["quads-random"]
    assert controls("rac", arms) == controls("quads-random", arms) == controls("w16a4", arms) == []


def test_made_arms_differ_only_where_they_were_made_to(tmp_path: Path) -> None:
    arms = {"bf16": Made(gap=1e-6), "nvfp4": Made(gap=0.02), "quads": Made(gap=0.02)}
    loaded = results.load(write(tmp_path, arms))
    found = [compare(loaded, pair(metric)).interval for metric in ("outcome/accuracy", "run/gap_mean")]
    assert all(interval.low <= 0 <= interval.high for interval in found)
