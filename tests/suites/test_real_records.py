"""Records that a real run of four steps on a CPU wrote are read as they are, and made-up records look like them."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quads.suites import config, export, summary
from tests.suites import made_results

REAL = Path(__file__).parent / "data" / "real"
PUBLISHED = sorted((Path(__file__).parents[2] / "docs" / "results").glob("h200-*/suite.json"))


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (REAL / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("real") / "out"
    shutil.copytree(REAL, out)
    export.write(out)
    summary.write(out)
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def test_the_difference_in_gap_is_that_of_the_tokens(document: dict[str, Any]) -> None:
    tokens: dict[tuple[str, int], float] = defaultdict(float)
    total: dict[tuple[str, int], float] = defaultdict(float)
    for record in records("plain/runs.jsonl"):
        run = record["arm"], record["seed"]
        tokens[run] += record["gap/tokens"]
        total[run] += record["gap/tokens"] * record["gap/mean"]
    of_seeds = [total["nvfp4", s] / tokens["nvfp4", s] - total["bf16", s] / tokens["bf16", s] for s in (0, 1)]
    (found,) = [c for c in document["comparisons"] if c["metric"] == "run/gap_mean"]
    assert found["difference"] == pytest.approx(np.mean(of_seeds)) and found["pairs"] == 2 and found["steps"] == 4


def test_accuracy_is_the_share_of_ones(document: dict[str, Any]) -> None:
    last = [r for r in records("plain/evals.jsonl") if r["arm"] == "nvfp4" and r["step"] == 4]
    (found,) = [o for o in document["outcomes"] if o["arm"] == "nvfp4"]
    share = np.mean([record["eval/correct"].count("1") / record["eval/problems"] for record in last])
    assert found["accuracy"]["value"] == pytest.approx(share)


def test_the_probe_is_read_by_place(document: dict[str, Any]) -> None:
    drawn = [
        r["probe/gap_mean"] for r in records("probe.jsonl") if (r.get("arm"), r.get("reference")) == ("quads", "w4")
    ]
    (found,) = [p for p in document["probe"] if (p["arm"], p["reference"]) == ("quads", "w4")]
    assert found["draws"] == len(drawn) == 2 and found["gap_mean"]["value"] == pytest.approx(np.mean(drawn))
    assert [layer["layer"] for layer in document["layers"]] == [0, 1, 2]


def test_four_steps_are_too_few_for_a_verdict(document: dict[str, Any]) -> None:
    gap = next(h for h in document["hypotheses"] if h["id"] == "gap")
    assert gap["verdict"] == "undecided" and "BF16 did not learn" in gap["why"]


def test_made_records_have_no_field_that_real_ones_lack() -> None:
    pairs = [
        (made_results.step_record("a", 0, 1, 0.5, 0.1), records("plain/runs.jsonl")[0]),
        (made_results.eval_record("a", 0, 1, np.ones(2)), records("plain/evals.jsonl")[0]),
        (made_results.probe_record("a", 0, np.ones(2)), next(r for r in records("probe.jsonl") if "draw" in r)),
    ]
    for made, real in pairs:
        assert set(made) <= set(real)
        assert {key: type(made[key]) for key in made} == {key: type(real[key]) for key in made}


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
def test_a_published_summary_is_what_its_records_give_under_the_present_rules(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(path.parent, out)
    (out / "summary.json").unlink()
    summary.write(out)
    made, published = (json.loads((folder / "summary.json").read_text()) for folder in (out, path.parent))
    assert made["label"] == published["label"] == "measured (NVIDIA H200)"
    for new, old in zip(made["hypotheses"], published["hypotheses"], strict=True):
        assert {**new, "why": ""} == pytest.approx({**old, "why": ""}, abs=1e-6), new["id"]
    verdicts = ", ".join(f"{[h['verdict'] for h in made['hypotheses']].count(v)} {v}" for v in config.VERDICTS)
    assert verdicts in (path.parent / "README.md").read_text()
