"""One arm: what ends it, what stops it, what it records, and what it goes on from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from quads.compare import job, problem_files
from quads.compare.arm import Arm, Watch
from quads.compare.checkpoint import load_state
from quads.compare.config import CompareError
from quads.compare.policy import Policy, load_policy
from quads.compare.records import untimed
from quads.compare.tasks import Task
from quads.compare.training import run_arm
from quads.integrations.trl import QuadsRollout
from quads.qat import prepare_qat
from tests.quads.compare_run import config

pytest.importorskip("trl")

from quads.integrations.trl_trainer import QuadsTrainer


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load_policy(config(tmp_path_factory.mktemp("none")), lambda step, loss: None)


def arm(out: Path, **changes: Any) -> Arm:
    settings = config(out, **{"steps": 3, "arms": ("bf16",), **changes})
    job.claim(settings)
    (recipe,) = settings.recipes()
    return Arm(settings, recipe, 0)


def steps(one: Arm) -> list[int]:
    return [record["step"] for record in one.records()[0].read()]


def _poisoned(monkeypatch: pytest.MonkeyPatch, at: int, poison: Any) -> None:
    """`poison(trainer, loss)` replaces the loss of update number `at`."""
    count, plain = [0], QuadsTrainer._compute_loss

    def compute(self: Any, model: Any, inputs: Any) -> Any:
        count[0] += 1
        loss = plain(self, model, inputs)
        return poison(self, loss) if count[0] == at else loss

    monkeypatch.setattr(QuadsTrainer, "_compute_loss", compute)


def test_a_loss_that_is_nan_ends_the_arm_with_a_record_and_it_is_not_run_again(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, said = arm(tmp_path), []
    _poisoned(monkeypatch, 3, lambda trainer, loss: loss * math.nan)  # two updates a step: step 2
    assert run_arm(one, policy, Watch(say=said.append)) == 3
    (failure,) = one.failures.read()
    assert (failure["arm"], failure["step"]) == ("bf16", 2) and "is nan" in failure["failed"]
    assert steps(one) == [1] and said == [f"bf16-seed0 ended at step 2: {failure['failed']}"]
    assert run_arm(one, policy, Watch()) == 3
    assert len(one.failures.read()) == 1


def test_weights_that_are_nan_end_the_arm_when_it_next_samples(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, plain = arm(tmp_path), QuadsRollout.__call__

    def call(self: Any, prompts: Any, trainer: Any) -> Any:
        if self.round == 1:
            with torch.no_grad():
                trainer.model.model.norm.weight.fill_(math.nan)
        return plain(self, prompts, trainer)

    monkeypatch.setattr(QuadsRollout, "__call__", call)
    run_arm(one, policy, Watch())
    (failure,) = one.failures.read()
    assert failure["step"] == 2 and "non-finite" in failure["failed"]


def test_a_reward_that_raises_scores_0_and_is_counted(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, raised = Task.score, [0]

    def score(self: Task, completion: str, problem: Any) -> float:
        if self.held_out and raised[0] < 5:
            raised[0] += 1
            raise ZeroDivisionError("planted")
        return plain(self, completion, problem)

    one = arm(tmp_path, steps=1)
    run_arm(one, policy, Watch(stop=lambda: True))  # the start is evaluated before the scorer breaks
    monkeypatch.setattr(Task, "score", score)
    monkeypatch.setattr("quads.compare.recorder.evaluate", lambda arm, policy, model, step: {**arm.tag(step)})
    run_arm(one, policy, Watch())
    (record,) = one.records()[0].read()
    assert record["reward/errors"] == 5
    assert 0 <= record["reward/mean"] <= 11 / 16  # five of sixteen samples scored 0


def test_stopping_finishes_the_step_with_a_checkpoint_whatever_checkpoint_every_says(
    tmp_path: Path, policy: Policy
) -> None:
    one, answers = arm(tmp_path, checkpoint_every=100), iter([False, True])  # asked before and after the first step
    assert run_arm(one, policy, Watch(stop=lambda: next(answers))) == 1 == steps(one)[-1]
    model = policy.fresh_copy()
    optimizer = torch.optim.AdamW(model.parameters())
    assert load_state(one.checkpoint, model, optimizer, one.identity) == 1
    assert len(optimizer.state) > 0


def test_what_is_newer_than_the_checkpoint_is_computed_again_to_the_same_records(
    tmp_path: Path, policy: Policy
) -> None:
    def crash(step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    said: list[str] = []
    cut, whole = arm(tmp_path / "cut", checkpoint_every=2, steps=4), arm(tmp_path / "whole", steps=4)
    run_arm(whole, policy, Watch())
    with pytest.raises(KeyboardInterrupt):
        run_arm(cut, policy, Watch(on_step=crash))
    assert steps(cut) == [1, 2, 3]
    run_arm(cut, policy, Watch(say=said.append))
    assert said == [
        "bf16-seed0: 1 records were newer than the checkpoint: dropped, they are computed again",
        "bf16-seed0: resumed after step 2",
    ]
    assert [untimed(r) for r in cut.records()[0].read()] == [untimed(r) for r in whole.records()[0].read()]


def test_a_finished_checkpoint_holds_the_masters_and_no_moments(tmp_path: Path, policy: Policy) -> None:
    one = arm(tmp_path, steps=1, arms=("quads",))
    run_arm(one, policy, Watch())
    model = policy.fresh_copy()
    prepare_qat(model, one.recipe)
    optimizer = torch.optim.AdamW(model.parameters())
    assert load_state(one.checkpoint, model, optimizer, one.identity) == 1 and not optimizer.state


@pytest.mark.parametrize("corrections", [{}, {"tis": 2.0, "r3": True}])
def test_corrections_are_recorded_where_they_are_on(
    tmp_path: Path, policy: Policy, corrections: dict[str, Any]
) -> None:
    one = arm(tmp_path, steps=1, arms=("nvfp4",), **corrections)
    run_arm(one, policy, Watch())
    (record,) = one.records()[0].read()
    assert ("correction/tis_mean" in record) == bool(corrections)
    assert record["gap/mean"] > 2.0**-10


def test_planted_outliers_leave_the_unquantised_function_as_it_was(tmp_path: Path, policy: Policy) -> None:
    stressed = load_policy(config(tmp_path, outliers="8x16"), lambda step, loss: None)
    ids = torch.tensor([policy.tokenizer("12+34=")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(stressed.model(ids).logits, policy.model(ids).logits)
    norm = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(stressed.model.state_dict()[norm], policy.model.state_dict()[norm])


def test_more_held_out_problems_than_the_start_left_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CompareError, match="'held_out' is 4097: the start has learnt from problems past the first 4096"
    ):
        load_policy(config(tmp_path, held_out=4097), lambda step, loss: None)


def test_a_problem_file_that_holds_out_what_the_start_has_imitated_is_refused(tmp_path: Path) -> None:
    task, path = Task("chain_sum", short=True, held_out=16), tmp_path / "p.jsonl"
    task.export(path, (0,), 8)
    load_policy(config(tmp_path, held_out=16, problems=str(path)), lambda step, loss: None)
    imitated = next(Task("chain_sum", short=True, held_out=4096).start())
    rows = [("held_out", 0, p.prompt, p.entry) for p in (*task.held_out, imitated)]
    problem_files.write(path, "chain_sum", rows)
    with pytest.raises(
        CompareError, match=r"p\.jsonl holds out '.*' \(1 in all\), which the start may have learnt from"
    ):
        load_policy(config(tmp_path, held_out=16, problems=str(path)), lambda step, loss: None)


def test_outliers_that_a_start_has_no_room_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CompareError, match="'outliers' is '16x8': channels is 16: a hidden size of 128 has 8 blocks"):
        load_policy(config(tmp_path, outliers="16x8"), lambda step, loss: None)
