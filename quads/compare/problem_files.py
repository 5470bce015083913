"""Problem sets as JSONL, so that a machine without reasoning-gym's sources or network asks the very same questions.

A line is {"schema", "task", "split": "held_out" or "train", "seed", "prompt", "entry"}; `entry` is reasoning-gym's.
A file whose training problems ask a held-out question is refused: accuracy on it would be memory.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quads.compare.config import CompareError
from quads.compare.records import write_atomically

SCHEMA = 1
SPLITS = ("held_out", "train")

Row = tuple[str, int, str, dict[str, Any]]  # split, seed, prompt, entry


@dataclass(frozen=True)
class ProblemFile:
    """The problems of one file by split and seed."""

    path: Path
    by_split: dict[tuple[str, int], list[tuple[str, dict[str, Any]]]]

    def rows(self, split: str, seed: int) -> list[tuple[str, dict[str, Any]]]:
        """(prompt, entry) in order; CompareError where the file has none for that seed."""
        if (split, seed) not in self.by_split:
            raise CompareError(f"problems file {self.path} has no {split} problems of seed {seed}: export them too")
        return self.by_split[split, seed]

    def check_held_out(self, left_alone: set[str]) -> None:
        """CompareError unless all held-out prompts are among those that the start's imitation left alone."""
        prompts = [prompt for prompt, _ in self.rows("held_out", 0) if prompt not in left_alone]
        if prompts:
            raise CompareError(
                f"problems file {self.path} holds out {prompts[0]!r} ({len(prompts)} in all), which the start may have"
                " learnt from: export the file with this reasoning-gym, or start from a model that reads text"
            )


def write(path: Path, task: str, rows: Iterable[Row]) -> int:
    """Write rows whole or not at all; returns how many."""
    lines = [
        json.dumps({"schema": SCHEMA, "task": task, "split": split, "seed": seed, "prompt": prompt, "entry": entry})
        for split, seed, prompt, entry in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, ("\n".join(lines) + "\n").encode())
    return len(lines)


def read(path: Path, task: str) -> ProblemFile:
    """The problems of `task` in a file; CompareError names file, line and rule."""
    if not path.is_file():
        raise CompareError(f"compare field 'problems' is {path}, which is no file")
    by_split: dict[tuple[str, int], list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    held_out: set[str] = set()
    trained: dict[str, int] = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        split, seed, prompt, entry = _row(path, number, line, task)
        by_split[split, seed].append((prompt, entry))
        if split == "held_out":
            held_out.add(prompt)
        else:
            trained.setdefault(prompt, number)
    leaked = sorted((trained[prompt], prompt) for prompt in held_out & trained.keys())
    if leaked:
        number, prompt = leaked[0]
        raise CompareError(
            f"problems file {path} leaks held-out problems: line {number} trains on {prompt!r} ({len(leaked)} in all)"
        )
    return ProblemFile(path, dict(by_split))


def _row(path: Path, number: int, line: str, task: str) -> Row:
    try:
        row = json.loads(line)
        found = row["schema"], row["task"], row["split"]
        problem = row["split"], int(row["seed"]), str(row["prompt"]), dict(row["entry"])
    except (ValueError, KeyError, TypeError) as error:
        raise CompareError(f"problems file {path} line {number} is no problem ({error}): export it again") from None
    if found[:2] != (SCHEMA, task) or found[2] not in SPLITS:
        raise CompareError(f"problems file {path} line {number} is {found}, not schema {SCHEMA} of task {task!r}")
    return problem
