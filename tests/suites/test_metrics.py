"""Each metric reads what its name says from the records of one run or of one draw."""

from __future__ import annotations

import numpy as np
import pytest

from quads.suites import metrics
from quads.suites.metrics import MetricError, probe_metric, run_metric
from quads.suites.results import Run
from tests.suites.made_results import eval_record, probe_record, step_record

STEPS = tuple(step_record("a", 0, step, 0.01 * step, 0.001 * step) for step in range(1, 51))
EVALS = tuple(eval_record("a", 0, step, np.arange(4) < step / 10) for step in (0, 20, 40))
RUN = Run("a", 0, STEPS, EVALS)


def read(name: str, run: Run = RUN) -> float:
    return float(run_metric(name).read(run).mean())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run/gap_mean", 0.0255),
        ("run/log_gap_mean", np.log(0.0255)),
        ("run/gap_p99", 0.255),
        ("run/gap_max", 1.275),
        ("run/gap_growth", 0.0455 - 0.0055),
        ("outcome/reward_last", 0.455),
        ("outcome/accuracy", 1.0),
        ("outcome/collapsed", 0.0),
        ("throughput/rollout_tokens_per_s", 1e4),
    ],
)
def test_a_metric_reads_its_number(name: str, value: float) -> None:
    assert read(name) == pytest.approx(value)


def test_the_mean_gap_weighs_every_token_alike() -> None:
    steps = (STEPS[0] | {"gap/tokens": 3, "gap/mean": 1.0}, STEPS[1] | {"gap/tokens": 1, "gap/mean": 5.0})
    assert read("run/gap_mean", Run("a", 0, steps)) == 2.0


def test_accuracy_has_a_value_a_problem_so_that_arms_pair_by_problem() -> None:
    assert run_metric("outcome/accuracy").read(RUN.until(20)).tolist() == [1, 1, 0, 0]


def test_trainer_accuracy_has_one_too_where_it_is_recorded() -> None:
    metric, record = run_metric("outcome/trainer_accuracy"), EVALS[-1]
    assert metric.read(RUN).tolist() == [1.0]
    assert metric.read(Run("a", 0, STEPS, (record | {"eval/trainer_correct": "0110"},))).tolist() == [0, 1, 1, 0]


def test_a_run_is_read_as_it_was_at_a_step() -> None:
    sample = run_metric("run/gap_mean").sample({3: RUN}, (3,), 10)
    assert list(sample) == [3] and sample[3] == pytest.approx([0.0055])


def test_a_collapse_is_counted() -> None:
    values = np.where(np.arange(1, 51) < 30, 0.8, 0.2)
    steps = tuple(step_record("a", 0, i, value, 0.01) for i, value in enumerate(values, 1))
    assert read("outcome/collapsed", Run("a", 0, steps, EVALS)) == 1.0


def test_the_probe_pairs_by_draw_and_a_single_draw_by_sequence() -> None:
    draws = {draw: probe_record("a", draw, np.array([1.0, 3.0]) * (draw + 1)) for draw in range(2)}
    metric = probe_metric("probe/gap_mean")
    assert {draw: value.tolist() for draw, value in metric.sample(draws).items()} == {0: [2.0], 1: [4.0]}
    assert metric.sample({0: draws[0]})[0].tolist() == [1.0, 3.0]


def test_a_record_without_the_metric_gives_no_value() -> None:
    record = probe_record("a", 0, np.ones(2))
    del record["probe/router_flips"]
    assert probe_metric("probe/router_flips").sample({0: record, 1: record}) == {}


@pytest.mark.parametrize(("name", "near"), [("run/gap_men", "run/gap_mean"), ("probe/klx", "probe/kl")])
def test_an_unknown_metric_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(MetricError, match=f"did you mean '{near}'"):
        metrics.check(name)
