"""The start policy of a comparison with its tokenizer and task, and held-out accuracy under any numerics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from filelock import FileLock
from torch import nn

from quads import models, routing, stress
from quads.compare import start
from quads.compare.characters import character_tokenizer
from quads.compare.config import CompareConfig, CompareError
from quads.compare.tasks import Task
from quads.compute import AS_LOADED, ROLLOUT, TRAINER, Arithmetic
from quads.integrations.trl import end_tokens, prompt_ids
from quads.recipes import Recipe
from quads.rollout import rollout_numerics
from quads.sampling import sample
from quads.upcycle import upcycle

_EVALUATION_BATCH = {"cpu": 512, "cuda": 2048}

Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Policy:
    """What every arm starts from; `model` is never trained, arms copy it."""

    model: Any
    tokenizer: Any
    task: Task
    source: str

    @cached_property
    def held_out_ids(self) -> list[list[int]]:
        """Token ids of the held-out prompts, in order."""
        return prompt_ids([problem.prompt for problem in self.task.held_out], self.tokenizer)

    def fresh_copy(self) -> Any:
        return copy.deepcopy(self.model)


def arithmetic(config: CompareConfig) -> tuple[Arithmetic, Arithmetic]:
    """How the trainer and the rollout compute what no recipe quantises: on a GPU through different code."""
    apart = torch.cuda.is_available()
    trainer, rollout = (TRAINER, ROLLOUT) if apart else (AS_LOADED, AS_LOADED)
    return Arithmetic(config.compute, trainer), Arithmetic(config.compute, rollout)


def load_policy(config: CompareConfig, progress: Progress) -> Policy:
    """The policy that `config` starts from; trains a character start where `fresh` asks for it or no file is there.

    Under `fresh` the file is kept in the output folder, so that a resumed run does not train it again. CompareError
    where the start cannot be had, cannot be stressed, has learnt from held-out problems, or has no router that `r3`
    could replay.
    """
    task = Task(config.task, short=config.character, held_out=config.held_out, problems=config.problems)
    if config.character:
        _check_held_out(config, task)
    model, tokenizer, source = _character(config, progress) if config.character else _text(config)
    if config.outliers:
        try:
            stress.add_outliers(model, stress.parse(config.outliers))
        except ValueError as error:
            raise CompareError(f"compare field 'outliers' is {config.outliers!r}: {error}") from None
    if config.r3 and not routing.routers(model):
        raise CompareError(f"compare field 'r3' replays routing, and {source} has no router")
    return Policy(model.to("cuda") if torch.cuda.is_available() else model, tokenizer, task, source)


def _check_held_out(config: CompareConfig, task: Task) -> None:
    """CompareError where accuracy would be measured on problems that the character start may have learnt from."""
    left_alone = start.named(config.start, config.task).held_out
    if config.held_out > left_alone:
        raise CompareError(
            f"compare field 'held_out' is {config.held_out}: the start has learnt from problems past the first"
            f" {left_alone}"
        )
    if task.file is not None:
        task.file.check_held_out(Task(config.task, short=True, held_out=left_alone).held_out_prompts)


def _character(config: CompareConfig, progress: Progress) -> tuple[Any, Any, str]:
    wanted = start.named(config.start, config.task)
    path = start.find(wanted)
    if config.fresh or path is None:
        folder = config.out if config.fresh else start.cache_folder()
        path = folder / f"start-{wanted.hash}.safetensors"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                start.train(wanted, path, progress)
    return start.load(path, wanted).to(getattr(torch, config.dtype)), character_tokenizer(), path.name


def _text(config: CompareConfig) -> tuple[Any, Any, str]:
    dtype = getattr(torch, config.dtype)
    dense = config.start.removesuffix("-moe")
    loaded = models.load(config.model or dense, dtype=dtype)
    if loaded.tokenizer is None:
        raise CompareError(f"compare field 'model' is {config.model}, which has no tokenizer: sampling needs one")
    if loaded.tokenizer.pad_token_id is None:
        loaded.tokenizer.pad_token = loaded.tokenizer.eos_token
    model = loaded.model if config.model or dense == config.start else upcycle(loaded.model)
    return model, loaded.tokenizer, loaded.source


def accuracy(model: nn.Module, policy: Policy, recipe: Recipe | None, config: CompareConfig) -> list[bool]:
    """Which held-out problems the greedy policy solves: under the rollout numerics of `recipe`, or as it stands."""
    numerics: AbstractContextManager[Any] = nullcontext() if recipe is None else rollout_numerics(model, recipe)
    trainer, rollout = arithmetic(config)
    training = model.training
    model.eval()
    solved: list[bool] = []
    problems, size = policy.task.held_out, _EVALUATION_BATCH[next(model.parameters()).device.type]
    with (trainer if recipe is None else rollout).on(model), numerics:
        for first in range(0, len(problems), size):
            batch = problems[first : first + size]
            texts = _greedy(model, policy, policy.held_out_ids[first : first + size], config.max_new_tokens)
            solved += [policy.task.solved(text, problem) for text, problem in zip(texts, batch, strict=True)]
    model.train(training)
    return solved


def _greedy(model: nn.Module, policy: Policy, prompts: list[list[int]], max_new_tokens: int) -> list[str]:
    completions = sample(
        model,
        prompts,
        samples=1,
        max_new_tokens=max_new_tokens,
        eos=end_tokens(model, policy.tokenizer),
        pad=policy.tokenizer.pad_token_id,
        temperature=0.0,
    )
    return policy.tokenizer.batch_decode(completions.tokens, skip_special_tokens=True)
