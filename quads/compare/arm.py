"""One arm of a comparison: GRPO through TRL under one recipe and one seed, a record a step, resumable at any step."""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Callable
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from filelock import FileLock, Timeout
from transformers import PrinterCallback, TrainerCallback

from quads.compare.checkpoint import load_state, save_state
from quads.compare.config import CompareConfig, CompareError, digest
from quads.compare.engines import make_rollout
from quads.compare.policy import Policy, accuracy, arithmetic
from quads.compare.records import Record, Records
from quads.compare.rewards import Rewards
from quads.errors import NonFiniteError
from quads.integrations.trl import QuadsRollout
from quads.qat import prepare_qat
from quads.recipes import Recipe

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
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
class Watch:
    """What follows a run from outside: `on_step` hears each finished step, `stop` ends it cleanly after one.

    say: takes one line for the user.
    """

    on_step: Callable[[int], None] = lambda step: None
    say: Callable[[str], None] = lambda line: None
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class _Learner:
    """What training changes, and what scores it."""

    model: Any
    optimizer: torch.optim.Optimizer
    rollout: QuadsRollout
    rewards: Rewards


@dataclass(frozen=True)
class Arm:
    """Names and files of one recipe and seed inside an output folder."""

    config: CompareConfig
    recipe: Recipe
    seed: int

    @property
    def label(self) -> str:
        return f"{self.recipe.name}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        return self.config.out / "arms" / self.label

    @property
    def checkpoint(self) -> Path:
        return self.folder / "state.safetensors"

    @property
    def identity(self) -> str:
        """Hash of all that decides this arm's records."""
        return digest([self.config.identity(), self.recipe.to_dict(), self.seed])

    def records(self) -> tuple[Records, Records]:
        """The files of training steps and of held-out evaluations, shared by all arms."""
        return Records(self.config.out / "runs.jsonl"), Records(self.config.out / "evals.jsonl")

    @property
    def failures(self) -> Records:
        """One record an arm that ended in NaN or Inf: {"arm", "seed", "step", "failed": why}; it is not run again."""
        return Records(self.config.out / "failures.jsonl")

    def failed(self) -> bool:
        return any(self.owns(record) for record in self.failures.read())

    def owns(self, record: Record) -> bool:
        return record["arm"] == self.recipe.name and record["seed"] == self.seed

    def tag(self, step: int) -> Record:
        return {"arm": self.recipe.name, "seed": self.seed, "step": step}


def run_arm(arm: Arm, policy: Policy, watch: Watch) -> int:
    """Train `arm` to the last step of its config, from its checkpoint where there is one; returns the step reached.

    An arm whose loss, weights or log-probabilities stop being finite ends there with a record in `failures`.
    """
    arm.folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(arm.folder / ".running.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise CompareError(f"{arm.label} is being run by another process in {arm.config.out}") from None
    try:
        return _run_locked(arm, policy, watch)
    finally:
        lock.release()


def _run_locked(arm: Arm, policy: Policy, watch: Watch) -> int:
    config, (runs, evals) = arm.config, arm.records()
    if arm.failed():
        return config.steps
    model = policy.fresh_copy()
    prepare_qat(model, arm.recipe)
    adam: dict[str, Any] = {"lr": config.lr, "betas": (0.9, 0.99), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(model.parameters(), fused=torch.cuda.is_available(), **adam)
    done = load_state(arm.checkpoint, model, optimizer, arm.identity)
    _drop_unfinished(arm, runs, evals, done, watch.say)
    if done == 0 and not any(arm.owns(record) for record in evals.read()):
        evals.append(evaluate(arm, policy, model, 0))
    watch.on_step(done)
    if done == config.steps or watch.stop():
        return done
    rollout = make_rollout(config, arm.recipe, arm.seed, done, arm.folder)
    learner = _Learner(model, optimizer, rollout, _rewards(arm, policy, done))
    with closing(rollout), _quiet():
        trainer = _trainer(arm, policy, learner)
        recorder = _Recorder(arm, policy, learner, watch, trainer)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(recorder)
        try:
            trainer.train()
        except NonFiniteError as error:
            recorder.fail(recorder.reached + 1, str(error))
    return recorder.reached


def _drop_unfinished(arm: Arm, runs: Records, evals: Records, done: int, say: Callable[[str], None]) -> None:
    """Forget what was written after the checkpoint: it is computed again, to the same values."""
    dropped, half = runs.keep(lambda record: not arm.owns(record) or record["step"] <= done)
    evals.keep(lambda record: not arm.owns(record) or record["step"] <= done)
    if half:
        say("runs.jsonl ended in a half-written line: dropped, it is computed again")
    if dropped:
        say(f"{arm.label}: {dropped} records were newer than the checkpoint: dropped, they are computed again")
    have = sorted(record["step"] for record in runs.read() if arm.owns(record))
    measured = {record["step"] for record in evals.read() if arm.owns(record)}
    if have != list(range(1, done + 1)) or (done and 0 not in measured):
        raise CompareError(f"{arm.config.out} lacks records of {arm.label} before step {done}: choose another --out")
    if done:
        say(f"{arm.label}: resumed after step {done}")


def evaluate(arm: Arm, policy: Policy, model: Any, step: int) -> Record:
    """Greedy held-out accuracy of the rollout policy and of the trainer's; `correct` has a digit a problem."""
    rollout = accuracy(model, policy, arm.recipe, arm.config)
    trainer = accuracy(model, policy, None, arm.config)
    return {
        **arm.tag(step),
        "eval/accuracy": float(np.mean(rollout)),
        "eval/trainer_accuracy": float(np.mean(trainer)),
        "eval/problems": len(rollout),
        "eval/correct": "".join(str(int(hit)) for hit in rollout),
        "eval/trainer_correct": "".join(str(int(hit)) for hit in trainer),
    }


class _Recorder(TrainerCallback):
    """Writes records, evaluations and checkpoints as TRL finishes each step, and seeds what TRL draws itself."""

    def __init__(self, arm: Arm, policy: Policy, learner: _Learner, watch: Watch, trainer: Any) -> None:
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


def _rewards(arm: Arm, policy: Policy, first: int) -> Rewards:
    """The scorer of the problems that steps `first` + 1 and on ask."""
    config = arm.config
    stream = islice(policy.task.train(arm.seed), first * config.prompts, config.steps * config.prompts)
    problems = list(stream)
    if len(problems) < (config.steps - first) * config.prompts:
        raise CompareError(
            f"compare field 'problems': {config.problems} has too few training problems of seed {arm.seed} for"
            f" {config.steps} steps"
        )
    return Rewards(policy.task, problems)


def _trainer(arm: Arm, policy: Policy, learner: _Learner) -> Any:
    import datasets

    from quads.integrations.trl_trainer import QuadsTrainer

    config, first, problems = arm.config, learner.rollout.round, learner.rewards.problems
    rows = {"prompt": [p.prompt for p in problems], "index": list(range(len(problems)))}
    return QuadsTrainer(
        model=learner.model,
        reward_funcs=learner.rewards,
        args=_arguments(arm, config.steps - first),
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=policy.tokenizer,
        rollout_func=learner.rollout,
        optimizers=(learner.optimizer, None),
        tis=config.tis,
        arithmetic=arithmetic(config)[0],
    )


def _arguments(arm: Arm, steps: int) -> Any:
    import trl

    config = arm.config
    return trl.GRPOConfig(
        output_dir=str(arm.folder),
        max_steps=steps * config.minibatches,
        per_device_train_batch_size=config.prompts * config.samples // config.minibatches,
        steps_per_generation=config.minibatches,
        gradient_accumulation_steps=1,
        num_generations=config.samples,
        max_completion_length=config.max_new_tokens,
        learning_rate=config.lr,
        lr_scheduler_type="constant",
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        beta=0.0,
        temperature=1.0,
        router_aux_loss_coef=0.0,  # TRL would add the model's own coefficient
        disable_dropout=True,
        shuffle_dataset=False,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=config.minibatches,
        save_strategy="no",
        logging_nan_inf_filter=False,  # a loss that is NaN must be seen
        report_to=config.report_to,
        run_name=arm.label,
        disable_tqdm=True,
        seed=arm.seed,
        dataloader_pin_memory=False,
    )


@contextmanager
def _quiet() -> Any:
    """No notices of TRL and transformers over the progress bar; errors stay."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
