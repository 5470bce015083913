"""One arm of a comparison: names and files of a recipe and a seed, who watches it, and its held-out accuracy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quads.compare.config import CompareConfig, digest
from quads.compare.policy import Policy, accuracy
from quads.compare.records import Record, Records
from quads.recipes import Recipe


@dataclass(frozen=True)
class Watch:
    """What follows a run from outside: `on_step` hears each finished step, `stop` ends it cleanly after one.

    say: takes one line for the user.
    """

    on_step: Callable[[int], None] = lambda step: None
    say: Callable[[str], None] = lambda line: None
    stop: Callable[[], bool] = lambda: False


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
