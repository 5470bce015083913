"""The verifiable task: problems and scores of reasoning-gym, prompts, and splits that share no question.

Problems are made here, or read from a file that `export` wrote on another machine (`--problems`): the very same ones,
scored by reasoning-gym's own scorer either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from quads.compare import problem_files
from quads.compare.config import CompareError
from quads.compare.families import FAMILIES, Family

SHIPPED_TASK = "chain_sum"

# Problem i of a stream is reasoning-gym's problem base + i: streams further apart than they are long share no seed.
_STREAM = 100_000_000
HELD_OUT, START, TRAIN = 0, 1, 2


@dataclass(frozen=True)
class Problem:
    """One question: what the model reads, and reasoning-gym's entry to score with."""

    prompt: str
    entry: dict[str, Any]


class Task:
    """A task by the name of a family, or of any reasoning-gym data set (its default difficulty).

    short: prompts are the family's, for the character model; else reasoning-gym's questions. problems: a file of
    `export` to read instead of making problems; CompareError where it leaks held-out problems into training.
    """

    def __init__(self, name: str, *, short: bool, held_out: int, problems: str = "") -> None:
        if short and name not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise CompareError(
                f"compare field 'task' is {name!r}, which the small model does not know ({known}): give --model"
            )
        self.name, self.short, self.held_out_count = name, short, held_out
        self.file = problem_files.read(Path(problems), name) if problems else None
        self._scorer = self._dataset(0, 1)

    @property
    def family(self) -> Family:
        return FAMILIES[self.name]

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

    @property
    def held_out_prompts(self) -> set[str]:
        """What `held_out` asks."""
        return {problem.prompt for problem in self.held_out}

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

    def export(self, path: Path, seeds: tuple[int, ...], count: int) -> int:
        """Write the held-out problems and `count` training problems of each seed; returns how many lines."""
        rows = [("held_out", 0, p.prompt, p.entry) for p in self.held_out]
        rows += [("train", seed, p.prompt, p.entry) for seed in seeds for p in islice(self.train(seed), count)]
        return problem_files.write(path, self.name, rows)

    def _apart(self, stream: int) -> Iterator[Problem]:
        held_out = self.held_out_prompts
        return (problem for problem in self._stream(stream) if problem.prompt not in held_out)

    def _stream(self, stream: int) -> Iterator[Problem]:
        if self.file is not None and stream != START:
            split = ("held_out", 0) if stream == HELD_OUT else ("train", stream - TRAIN)
            yield from (Problem(prompt, entry) for prompt, entry in self.file.rows(*split))
            return
        dataset = self._dataset(stream * _STREAM, _STREAM)
        for index in range(_STREAM):
            entry = dataset[index]
            yield Problem(self.family.prompt(entry) if self.short else entry["question"], entry)

    def _dataset(self, seed: int, size: int) -> Any:
        import reasoning_gym

        known = FAMILIES.get(self.name)
        name, options = (known.dataset, known.options) if known else (self.name, {})
        try:
            return reasoning_gym.create_dataset(name, seed=seed, size=size, **options)
        except ValueError as error:
            raise CompareError(f"compare field 'task' is {self.name!r}: {error}") from None
