"""The reward function of a comparison: reasoning-gym's score, 0 and a count where scoring raises."""

from __future__ import annotations

import logging
from typing import Any

from quads.compare.tasks import Problem, Task

logger = logging.getLogger(__name__)


class Rewards:
    """Scores completions of `problems` as TRL calls it, with the dataset's column `index`."""

    __name__ = "reward"  # TRL names its metrics after the function

    def __init__(self, task: Task, problems: list[Problem]) -> None:
        self.task, self.problems = task, problems
        self._errors = 0

    def __call__(self, completions: list[str], index: list[int], **_: Any) -> list[float]:
        return [self._score(text, self.problems[i]) for text, i in zip(completions, index, strict=True)]

    def take_errors(self) -> int:
        """How many samples could not be scored since the last call."""
        errors, self._errors = self._errors, 0
        return errors

    def _score(self, text: str, problem: Problem) -> float:
        try:
            return self.task.score(text, problem)
        except Exception as error:  # a scorer is other people's code
            self._errors += 1
            if self._errors == 1:
                logger.warning("scoring %r of %r raised %s: %s", text, problem.prompt, type(error).__name__, error)
            return 0.0
