"""What is missing from a summary stands beside its numbers, one line each."""

from __future__ import annotations

from pathlib import Path

from quads.suites import results, summary
from tests.suites.made_results import ARMS, Made, append, write


def noted(out: Path) -> tuple[str, ...]:
    return summary.summarize(results.load(out)).noted


def test_a_finished_suite_has_nothing_to_note(tmp_path: Path) -> None:
    assert noted(write(tmp_path, ARMS)) == ()


def test_an_arm_without_records_is_unfinished(tmp_path: Path) -> None:
    out = write(tmp_path, ARMS)
    for name in ("runs.jsonl", "evals.jsonl"):
        path = out / "plain" / name
        path.write_text("".join(x for x in path.read_text().splitlines(keepends=True) if '"quads"' not in x))
    assert noted(out) == ("plain: quads finished 0 of 4 runs of 60 steps",)


def test_a_run_that_failed_is_named_with_its_step_and_reason(tmp_path: Path) -> None:
    out = write(tmp_path, {**ARMS, "nvfp4": Made(gap=0.02)})
    append(out / "plain" / "failures.jsonl", [{"schema": 1, "arm": "nvfp4", "seed": 2, "step": 61, "failed": "loss"}])
    assert "plain: nvfp4 seed 2 ended at step 61 (loss): counted as collapsed, solving nothing after" in noted(out)
