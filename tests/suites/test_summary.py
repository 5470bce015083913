"""summary.json holds the stated keys whether the suite is finished, unfinished or has only begun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quads.suites import summary
from tests.suites.made_results import ARMS, Made, append, hypothesis, probe_record, write

KEYS = {
    *("schema", "suite", "title", "question", "label", "identity", "settings", "learned", "outcomes", "comparisons"),
    *("curves", "probe", "probe_comparisons", "layers", "hypotheses", "noted"),
}


def written(out: Path) -> dict[str, Any]:
    summary.write(out)
    refuse = {"parse_constant": lambda word: pytest.fail(f"{word} is no JSON")}
    return json.loads((out / "summary.json").read_text(), **refuse)


def test_a_finished_suite_has_every_key_and_nothing_to_note(tmp_path: Path) -> None:
    document = written(write(tmp_path, ARMS))
    assert set(document) == KEYS and document["schema"] == 1 and document["noted"] == []
    assert [entry["arm"] for entry in document["outcomes"]] == ["bf16", "nvfp4", "quads"]
    assert document["learned"][0]["learned"] is True and document["hypotheses"][0]["verdict"] == "supported"


def test_writing_twice_writes_the_same_bytes(tmp_path: Path) -> None:
    out = write(tmp_path, ARMS)
    summary.write(out)
    first = (out / "summary.json").read_bytes()
    summary.write(out)
    assert (out / "summary.json").read_bytes() == first


def test_every_comparison_states_what_it_could_have_detected(tmp_path: Path) -> None:
    for entry in written(write(tmp_path, ARMS))["comparisons"]:
        assert entry["pairs"] == 4 and entry["steps"] == 60
        assert entry["low"] <= entry["difference"] <= entry["high"] and entry["mde"] >= 0


def test_an_unfinished_arm_is_noted_with_where_it_is_compared(tmp_path: Path) -> None:
    out = write(tmp_path, {**ARMS, "quads": Made(gap=0.01, seeds=3)})
    noted = written(out)["noted"]
    assert "plain: quads finished 3 of 4 runs of 60 steps, compared at step 60 over seeds 0, 1, 2" in noted
    assert any(text.startswith("plain: seed 3 was left out") for text in noted)


def test_a_suite_that_has_only_begun_has_a_summary(tmp_path: Path) -> None:
    out = write(tmp_path, ARMS)
    for path in out.glob("plain/*.jsonl"):
        path.unlink()
    document = written(out)
    assert document["outcomes"] == [] and document["hypotheses"][0]["verdict"] == "undecided"
    assert "plain: bf16 finished 0 of 4 runs of 60 steps" in document["noted"]


def test_one_seed_gives_values_without_made_up_intervals(tmp_path: Path) -> None:
    document = written(write(tmp_path, {name: Made(seeds=1) for name in ARMS}))
    by_metric = {entry["metric"]: entry for entry in document["comparisons"]}
    assert by_metric["run/gap_mean"]["low"] is None and by_metric["run/gap_mean"]["mde"] is None
    assert by_metric["outcome/accuracy"]["pairs"] == 1  # its interval is that of the problems


def test_errors_of_the_reward_are_counted(tmp_path: Path) -> None:
    out = write(tmp_path, ARMS)
    path = out / "plain" / "runs.jsonl"
    path.write_text(path.read_text().replace('"reward/mean"', '"reward/errors": 2, "reward/mean"', 3))
    assert "plain: the reward of bf16 raised 6 times; those samples scored 0" in written(out)["noted"]


def test_the_probe_and_its_layers_are_averaged_over_draws(tmp_path: Path) -> None:
    wanted = hypothesis(metric="probe/kl", where="start/w4", direction="lower")
    out, rng = write(tmp_path, ARMS, wanted), np.random.default_rng(0)
    for draw in range(3):
        gaps = rng.lognormal(-5, 0.3, size=64)
        layer = {"schema": 1, "kind": "layer", "policy": "start", "outliers": "", "draw": draw, "layer": 1}
        append(out / "probe.jsonl", [probe_record("nvfp4", draw, gaps), probe_record("quads", draw, gaps / 2)])
        append(out / "probe.jsonl", [{**layer, "weights": 1.0 + draw, "activations": 2.0, "label": "emulated (CPU)"}])
    document = written(out)
    assert document["layers"] == [
        {"policy": "start", "outliers": "", "layer": 1, "draws": 3, "weights": 2.0, "activations": 2.0}
    ]
    assert {(entry["arm"], entry["draws"], entry["tokens"]) for entry in document["probe"]} == {
        ("nvfp4", 3, 960),
        ("quads", 3, 960),
    }
    compared = {(entry["metric"], entry["where"], entry["arm"]) for entry in document["probe_comparisons"]}
    assert ("probe/gap_mean", "start/w4", "quads") in compared and document["hypotheses"][0]["pairs"] == 3
