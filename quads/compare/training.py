"""Train one arm: GRPO through TRL under one recipe and one seed, resumable at any step."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout
from transformers import PrinterCallback

from quads.compare.arm import Arm, Watch, evaluate
from quads.compare.checkpoint import load_state
from quads.compare.config import CompareError
from quads.compare.engines import make_rollout
from quads.compare.policy import Policy, arithmetic
from quads.compare.recorder import Learner, Recorder
from quads.compare.records import Records
from quads.compare.rewards import Rewards
from quads.errors import NonFiniteError
from quads.qat import prepare_qat

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


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
    learner = Learner(model, optimizer, rollout, _rewards(arm, policy, done))
    with closing(rollout), _quiet():
        trainer = _trainer(arm, policy, learner)
        recorder = Recorder(arm, policy, learner, watch, trainer)
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


def _trainer(arm: Arm, policy: Policy, learner: Learner) -> Any:
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
