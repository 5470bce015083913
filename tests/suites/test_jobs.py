"""The order of a suite's runs, and what counts as finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from quads.compare.records import Records
from quads.suites import config
from quads.suites.config import SuiteError
from quads.suites.jobs import jobs
from tests.suites.running import suite


def test_every_cell_and_arm_of_a_seed_comes_before_the_next_seed(tmp_path: Path) -> None:
    labels = [job.label for job in jobs(suite(tmp_path), tmp_path)]
    assert labels == [f"{cell}/{arm}-seed{s}" for s in (0, 1) for cell in ("slow", "fast") for arm in ("bf16", "quads")]


def test_some_arms_and_seeds_can_be_asked_for_and_unknown_ones_are_named(tmp_path: Path) -> None:
    chosen = jobs(suite(tmp_path), tmp_path, arms=("quads",), seeds=(1,))
    assert [job.label for job in chosen] == ["slow/quads-seed1", "fast/quads-seed1"]
    with pytest.raises(SuiteError, match=r"has no arm qat \(it has bf16, quads\)"):
        jobs(suite(tmp_path), tmp_path, arms=("qat",))
    with pytest.raises(SuiteError, match=r"has no seed 2 \(it has 0, 1\)"):
        jobs(suite(tmp_path), tmp_path, seeds=(2,))


def test_a_suite_that_only_probes_has_no_jobs() -> None:
    assert jobs(config.load("h200-ratio"), Path(".")) == []


def test_a_run_is_finished_by_its_records_alone_or_by_a_failure(tmp_path: Path) -> None:
    job, other = jobs(suite(tmp_path), tmp_path)[:2]
    out = job.compare.out
    out.mkdir()
    runs, evals = Records(out / "runs.jsonl"), Records(out / "evals.jsonl")
    tag = {"arm": "bf16", "seed": 0}
    for step in (1, 2):
        runs.append({**tag, "step": step})
    for step in (0, 2, 3):
        evals.append({**tag, "step": step})
    assert not job.finished()
    runs.append({**tag, "step": 3})
    assert job.finished() and not other.finished()
    Records(out / "failures.jsonl").append({"arm": "quads", "seed": 0, "step": 2, "failed": "loss is nan"})
    assert other.finished()
