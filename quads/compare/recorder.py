"""What an arm leaves behind, step by step: records, evaluations, checkpoints, and a failure where numbers end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from quads.compare.arm import Arm, Watch, evaluate
from quads.compare.checkpoint import save_state
from quads.compare.policy import Policy
from quads.compare.records import Record
from quads.compare.rewards import Rewards
from quads.integrations.trl import QuadsRollout

_LOGGED = {
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "reward/flat_groups": "frac_reward_zero_std",
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/entropy": "entropy",
    "train/clipped": "clip_ratio/region_mean",
    "rollout/mean_length": "completions/mean_length",
    "rollout/cut_share": "completions/clipped_ratio",
}


@dataclass(frozen=True)
class Learner:
    """What training changes, and what scores it."""

    model: Any
    optimizer: torch.optim.Optimizer
    rollout: QuadsRollout
    rewards: Rewards


class Recorder(TrainerCallback):
    """Writes records, evaluations and checkpoints as TRL finishes each step, and seeds what TRL draws itself."""

    def __init__(self, arm: Arm, policy: Policy, learner: Learner, watch: Watch, trainer: Any) -> None:
        self.arm, self.policy, self.learner, self.watch, self.trainer = arm, policy, learner, watch, trainer
        self.runs, self.evals = arm.records()
        self.rollout = rollout = learner.rollout
        self.first = self.reached = rollout.round
        self.started = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        config = self.arm.config
        if state.global_step % config.minibatches == 0:
            # TRL shuffles the samples of a step with the global generator: a resumed run must shuffle alike.
            torch.manual_seed(self.arm.seed * 1_000_003 + self.first + state.global_step // config.minibatches)
            self.started = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" not in logs:  # TRL's closing summary
            return
        config, step = self.arm.config, self.first + state.global_step // self.arm.config.minibatches
        record = self._record(step, logs, time.perf_counter() - self.started)
        wrong = [f"{name} is {value}" for name, value in record.items() if _not_finite(value)]
        if wrong:
            self.fail(step, wrong[0])
            control.should_training_stop = True
            return
        if step % config.eval_every == 0 or step == config.steps:
            self.evals.append(evaluate(self.arm, self.policy, self.learner.model, step))
        self.runs.append(record)
        stop = self.watch.stop()
        if step % config.checkpoint_every == 0 or step == config.steps or stop:
            optimizer = self.learner.optimizer if step < config.steps else None  # its moments are two thirds of a file
            save_state(self.arm.checkpoint, self.learner.model, optimizer, step, self.arm.identity)
        self.reached = step
        self.watch.on_step(step)
        control.should_training_stop = control.should_training_stop or stop

    def fail(self, step: int, why: str) -> None:
        """Mark the arm as ended at `step`."""
        self.arm.failures.append({**self.arm.tag(step), "failed": why})
        self.watch.say(f"{self.arm.label} ended at step {step}: {why}")
        self.reached = self.arm.config.steps

    def _record(self, step: int, logs: dict[str, Any], seconds: float) -> Record:
        measured = self.rollout.history[-1]
        assert measured.round + 1 == step
        return {
            **self.arm.tag(step),
            **{name: float(logs[key]) for name, key in _LOGGED.items()},
            **measured.gap,
            **self.trainer.corrected,
            "reward/errors": self.learner.rewards.take_errors(),
            "rollout/tokens": measured.tokens,
            "rollout/mean_logp": measured.mean_logp,
            "throughput/rollout_tokens_per_s": measured.tokens / measured.sampling_seconds,
            "throughput/step_tokens_per_s": measured.tokens / seconds,
            "time/rollout_s": measured.sampling_seconds,
            "time/sync_s": measured.sync_seconds,
            "time/gap_s": measured.scoring_seconds,
            "time/step_s": seconds,
            **_memory(),
        }


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _memory() -> Record:
    return {"memory/peak_gib": torch.cuda.max_memory_allocated() / 2**30} if torch.cuda.is_available() else {}
