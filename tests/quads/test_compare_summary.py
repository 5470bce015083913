"""Numbers of the summary against hand-worked values, and the interval against a closed form."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from quads.compare import table
from quads.compare.summary import learned, summarize
from tests.quads.comparison import PROBLEMS, comparison, evaluation, step_record


def test_gap_means_weigh_every_token_alike() -> None:
    runs = [step_record("quads", 0, 1, 0.1, tokens=300), step_record("quads", 0, 2, 0.5, tokens=100)]
    numbers = summarize(runs, [evaluation("quads", 0, 0, 80)])["arms"]["quads"]
    assert numbers["gap/mean"] == pytest.approx((300 * 0.1 + 100 * 0.5) / 400)
    assert numbers["gap/k3"] == pytest.approx((300 * 0.01 + 100 * 0.25) / 400)
    assert numbers["gap/max"] == 10.0
    assert numbers["gap/p99"] == pytest.approx(1.5)
    assert numbers["gap/tokens"] == 400


def test_first_and_last_gap_are_means_of_five_steps() -> None:
    runs = [step_record("quads", 0, step, float(step)) for step in range(1, 21)]
    numbers = summarize(runs, [evaluation("quads", 0, 0, 80)])["arms"]["quads"]
    assert (numbers["gap/mean_first"], numbers["gap/mean_last"]) == (3.0, 18.0)


def test_the_gain_is_paired_by_problem() -> None:
    runs = [step_record("bf16", 0, 1, 0.1)]
    # 20 of 200 problems newly solved, none lost: an unpaired interval would reach 0 (standard error 0.05).
    summary = summarize(runs, [evaluation("bf16", 0, 0, 100), evaluation("bf16", 0, 1, 120)])
    gain = summary["arms"]["bf16"]["accuracy/gain"]
    error = math.sqrt(0.1 * 0.9 / PROBLEMS)
    assert gain["value"] == pytest.approx(0.1)
    assert gain["low"] == pytest.approx(0.1 - 1.96 * error, abs=0.012)
    assert gain["high"] == pytest.approx(0.1 + 1.96 * error, abs=0.015)
    assert learned(summary) is True


def test_no_gain_is_not_learning_and_no_baseline_is_unknown() -> None:
    runs, same = [step_record("bf16", 0, 1, 0.1)], [evaluation("bf16", 0, 0, 100), evaluation("bf16", 0, 1, 100)]
    assert learned(summarize(runs, same)) is False
    assert learned(summarize([step_record("quads", 0, 1, 0.1)], [evaluation("quads", 0, 0, 1)])) is None
    assert "did not learn" in table.verdict(False)


def test_an_evaluation_that_some_seed_lacks_is_left_out() -> None:
    runs = [step_record("quads", seed, 1, 0.1) for seed in (0, 1)]
    evals = [evaluation("quads", 0, 0, 80), evaluation("quads", 1, 0, 100), evaluation("quads", 0, 5, 200)]
    numbers = summarize(runs, evals)["arms"]["quads"]
    assert numbers["accuracy/end"]["value"] == 0.45


def test_arms_are_compared_with_bf16_at_the_same_step_only() -> None:
    summary = summarize(*comparison())
    assert summary["arms"]["quads"]["accuracy/against_bf16"]["value"] == pytest.approx(-0.1)
    assert "accuracy/against_bf16" not in summary["arms"]["bf16"]
    runs, evals = comparison()
    shorter = [record for record in evals if record["arm"] != "quads" or record["step"] < 12]
    earlier = summarize(runs, shorter)["arms"]["quads"]["accuracy/against_bf16"]["value"]
    assert earlier == pytest.approx(round(200 * (0.4 + 0.8 / 3)) / 200 - round(200 * (0.4 + 1 / 3)) / 200)
    alone = [record for record in evals if record["arm"] != "bf16" or record["step"] < 12]
    assert "accuracy/against_bf16" not in summarize(runs, alone)["arms"]["quads"]


def test_an_empty_folder_has_no_arms() -> None:
    assert summarize([], [])["arms"] == {}


def test_the_table_fits_eighty_columns_and_shows_every_arm() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(table.render(summarize(*comparison())))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert all(text.count(arm) >= 2 for arm in ("bf16", "nvfp4", "quads"))
    assert table.SPEED_NOTE in text
