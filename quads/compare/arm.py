"""One arm of a comparison: GRPO through TRL under one recipe and one seed, a record a step, resumable at any step."""

from __future__ import annotations

import logging
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
from quads.compare.policy import Policy, accuracy
from quads.compare.records import Record, Records
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
class _Learner:
    """What training changes."""

    model: Any
    optimizer: torch.optim.Optimizer
    rollout: QuadsRollout


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

    def owns(self, record: Record) -> bool:
        return record["arm"] == self.recipe.name and record["seed"] == self.seed

    def tag(self, step: int) -> Record:
        return {"arm": self.recipe.name, "seed": self.seed, "step": step}


def run_arm(arm: Arm, policy: Policy, on_step: Callable[[int], None], say: Callable[[str], None]) -> None:
    """Train `arm` to the last step of its config, from its checkpoint where there is one."""
    arm.folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(arm.folder / ".running.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise CompareError(f"{arm.label} is being run by another process in {arm.config.out}") from None
    try:
        _run_locked(arm, policy, on_step, say)
    finally:
        lock.release()


def _run_locked(arm: Arm, policy: Policy, on_step: Callable[[int], None], say: Callable[[str], None]) -> None:
    config, (runs, evals) = arm.config, arm.records()
    model = policy.fresh_copy()
    prepare_qat(model, arm.recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=0.0)
    done = load_state(arm.checkpoint, model, optimizer, arm.identity)
    _drop_unfinished(arm, runs, evals, done, say)
    if done == 0 and not any(arm.owns(record) for record in evals.read()):
        evals.append(evaluate(arm, policy, model, 0))
    on_step(done)
    if done == config.steps:
        return
    rollout = make_rollout(config, arm.recipe, arm.seed, done, arm.folder)
    learner = _Learner(model, optimizer, rollout)
    with closing(rollout), _quiet():
        trainer = _trainer(arm, policy, learner)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_Recorder(arm, policy, learner, on_step))
        trainer.train()


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
    }


class _Recorder(TrainerCallback):
    """Writes records, evaluations and checkpoints as TRL finishes each step, and seeds what TRL draws itself."""

    def __init__(self, arm: Arm, policy: Policy, learner: _Learner, on_step: Callable[[int], None]) -> None:
        self.arm, self.policy, self.learner, self.on_step = arm, policy, learner, on_step
        self.runs, self.evals = arm.records()
        self.rollout = rollout = learner.rollout
        self.first, self.started = rollout.round, time.perf_counter()

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
        seconds = time.perf_counter() - self.started
        if step % config.eval_every == 0 or step == config.steps:
            self.evals.append(evaluate(self.arm, self.policy, self.learner.model, step))
        self.runs.append(self._record(step, logs, seconds))
        save_state(self.arm.checkpoint, self.learner.model, self.learner.optimizer, step, self.arm.identity)
        self.on_step(step)

    def _record(self, step: int, logs: dict[str, Any], seconds: float) -> Record:
        measured = self.rollout.history[-1]
        assert measured.round + 1 == step
        return {
            **self.arm.tag(step),
            **{name: float(logs[key]) for name, key in _LOGGED.items()},
            **measured.gap,
            "rollout/tokens": measured.tokens,
            "rollout/mean_logp": measured.mean_logp,
            "throughput/rollout_tokens_per_s": measured.tokens / measured.sampling_seconds,
            "throughput/step_tokens_per_s": measured.tokens / seconds,
            "time/rollout_s": measured.sampling_seconds,
            "time/sync_s": measured.sync_seconds,
            "time/gap_s": measured.scoring_seconds,
            "time/step_s": seconds,
        }


def _trainer(arm: Arm, policy: Policy, learner: _Learner) -> Any:
    import datasets
    import trl

    config, first = arm.config, learner.rollout.round
    stream = islice(policy.task.train(arm.seed), first * config.prompts, config.steps * config.prompts)
    problems = list(stream)

    def reward(completions: list[str], index: list[int], **_: Any) -> list[float]:
        return [policy.task.score(text, problems[i]) for text, i in zip(completions, index, strict=True)]

    rows = {"prompt": [p.prompt for p in problems], "index": list(range(len(problems)))}
    return trl.GRPOTrainer(
        model=learner.model,
        reward_funcs=reward,
        args=_arguments(arm, config.steps - first),
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=policy.tokenizer,
        rollout_func=learner.rollout,
        optimizers=(learner.optimizer, None),
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
        report_to="none",
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
