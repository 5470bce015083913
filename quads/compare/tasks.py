"""The verifiable task: problems and scores of reasoning-gym, prompts, and splits that share no question.

`chain_sum` at two terms is small enough for a model of a million parameters; its demonstrator forgets carries and
borrows in a share of the problems, so that imitation stops at a middling accuracy and reinforcement has room.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from quads.compare.config import CompareError

SHIPPED_TASK = "chain_sum"
OPTIONS: dict[str, dict[str, Any]] = {
    SHIPPED_TASK: {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
}
DEMONSTRATOR = "forgets every carry and borrow of a problem, or none"
FORGETFUL = 0.7  # share of problems in which the demonstrator forgets every carry and borrow

# Problem i of a stream is reasoning-gym's problem base + i: streams further apart than they are long share no seed.
_STREAM = 100_000_000
HELD_OUT, START, TRAIN = 0, 1, 2


@dataclass(frozen=True)
class Problem:
    """One question: what the model reads, and reasoning-gym's entry to score with."""

    prompt: str
    entry: dict[str, Any]

    @property
    def expression(self) -> str:
        return str(self.entry["metadata"]["expression"])


class Task:
    """A reasoning-gym task; `short` prompts are the bare expression for the small character model."""

    def __init__(self, name: str, *, short: bool, held_out: int) -> None:
        if short and name != SHIPPED_TASK:
            raise CompareError(f"compare field 'task' is {name!r}, which the small model does not know: give --model")
        self.name, self.short, self.held_out_count = name, short, held_out
        self._scorer = self._dataset(0, 1)

    @cached_property
    def held_out(self) -> list[Problem]:
        """The problems that accuracy is measured on, all different."""
        seen: dict[str, Problem] = {}
        for problem in islice(self._stream(HELD_OUT), 100 * self.held_out_count):
            seen.setdefault(problem.prompt, problem)
            if len(seen) == self.held_out_count:
                return list(seen.values())
        raise CompareError(
            f"compare field 'held_out' is {self.held_out_count}: {self.name} has only {len(seen)} questions"
        )

    def train(self, seed: int) -> Iterator[Problem]:
        """Endless training problems of `seed`, none of them held out."""
        return self._apart(TRAIN + seed)

    def start(self) -> Iterator[Problem]:
        """Endless problems of the supervised start, none of them held out."""
        return self._apart(START)

    def score(self, completion: str, problem: Problem) -> float:
        """reasoning-gym's score, 0 to 1."""
        return float(self._scorer.score_answer(completion.strip(), problem.entry))

    def solved(self, completion: str, problem: Problem) -> bool:
        """Whether reasoning-gym gives full marks."""
        return self.score(completion, problem) >= 1.0

    def _apart(self, stream: int) -> Iterator[Problem]:
        held_out = {problem.prompt for problem in self.held_out}
        return (problem for problem in self._stream(stream) if problem.prompt not in held_out)

    def _stream(self, stream: int) -> Iterator[Problem]:
        dataset = self._dataset(stream * _STREAM, _STREAM)
        for index in range(_STREAM):
            entry = dataset[index]
            prompt = f"{entry['metadata']['expression']}=".replace(" ", "") if self.short else entry["question"]
            yield Problem(prompt, entry)

    def _dataset(self, seed: int, size: int) -> Any:
        import reasoning_gym

        try:
            return reasoning_gym.create_dataset(self.name, seed=seed, size=size, **OPTIONS.get(self.name, {}))
        except ValueError as error:
            raise CompareError(f"compare field 'task' is {self.name!r}: {error}") from None


def demonstrate(problem: Problem, rng: random.Random, forgetful: float = FORGETFUL) -> str:
    """The imperfect demonstrator's answer to a two-term sum: right, or with every carry and borrow forgotten."""
    a, operator, b = problem.expression.split()
    first, second = int(a), int(b) if operator == "+" else -int(b)
    return str(forget(first, second) if rng.random() < forgetful else first + second)


def forget(a: int, b: int) -> int:
    """a + b column by column, every carry and borrow forgotten, the last one too: 57 + 87 = 34."""
    if (a < 0) == (b < 0):
        return (-1 if a < 0 else 1) * _columns(abs(a), abs(b), 1)
    high, low = (a, b) if abs(a) >= abs(b) else (b, a)
    return (-1 if high < 0 else 1) * _columns(abs(high), abs(low), -1)


def _columns(a: int, b: int, sign: int) -> int:
    total, place = 0, 1
    while a or b:
        total += (a % 10 + sign * (b % 10)) % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return total
