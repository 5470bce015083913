"""The start policy of a comparison with its tokenizer and task, and held-out accuracy under any numerics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quads import models
from quads.compare import start
from quads.compare.characters import character_tokenizer
from quads.compare.config import CompareConfig, CompareError
from quads.compare.start import StartConfig
from quads.compare.tasks import Task
from quads.integrations.trl import end_tokens
from quads.recipes import Recipe
from quads.rollout import rollout_numerics
from quads.sampling import sample

_EVALUATION_BATCH = 512


@dataclass(frozen=True)
class Policy:
    """What every arm starts from; `model` is never trained, arms copy it."""

    model: Any
    tokenizer: Any
    task: Task
    source: str

    def fresh_copy(self) -> Any:
        return copy.deepcopy(self.model)


def load_policy(config: CompareConfig, progress: Callable[[int, float], None]) -> Policy:
    """The policy that `config` starts from; trains the small model where `fresh` asks for it or no file is there.

    Under `fresh` the file is kept in the output folder, so that a resumed run does not train it again.
    """
    dtype = getattr(torch, config.dtype)
    task = Task(config.task, short=not config.model, held_out=config.held_out)
    if config.model:
        loaded = models.load(config.model, dtype=dtype)
        if loaded.tokenizer is None:
            raise CompareError(f"compare field 'model' is {config.model}, which has no tokenizer: sampling needs one")
        if loaded.tokenizer.pad_token_id is None:
            loaded.tokenizer.pad_token = loaded.tokenizer.eos_token
        return Policy(_on_device(loaded.model), loaded.tokenizer, task, loaded.source)
    recipe = StartConfig()
    path = start.find(recipe)
    if config.fresh or path is None:
        path = (config.out if config.fresh else start.cache_folder()) / f"start-{recipe.hash}.safetensors"
        if not path.exists():
            start.train(recipe, path, progress)
    model = start.load(path, recipe).to(dtype)
    return Policy(_on_device(model), character_tokenizer(), task, path.name)


def accuracy(model: nn.Module, policy: Policy, recipe: Recipe | None, config: CompareConfig) -> list[bool]:
    """Which held-out problems the greedy policy solves: under the rollout numerics of `recipe`, or as it stands."""
    numerics: AbstractContextManager[Any] = nullcontext() if recipe is None else rollout_numerics(model, recipe)
    training = model.training
    model.eval()
    solved: list[bool] = []
    problems = policy.task.held_out
    with numerics:
        for first in range(0, len(problems), _EVALUATION_BATCH):
            batch = problems[first : first + _EVALUATION_BATCH]
            texts = _greedy(model, policy, [problem.prompt for problem in batch], config.max_new_tokens)
            solved += [policy.task.solved(text, problem) for text, problem in zip(texts, batch, strict=True)]
    model.train(training)
    return solved


def _greedy(model: nn.Module, policy: Policy, prompts: list[str], max_new_tokens: int) -> list[str]:
    completions = sample(
        model,
        [policy.tokenizer(prompt)["input_ids"] for prompt in prompts],
        samples=1,
        max_new_tokens=max_new_tokens,
        eos=end_tokens(model, policy.tokenizer),
        pad=policy.tokenizer.pad_token_id,
        temperature=0.0,
    )
    return policy.tokenizer.batch_decode(completions.tokens, skip_special_tokens=True)


def _on_device(model: Any) -> Any:
    return model.to("cuda") if torch.cuda.is_available() else model
