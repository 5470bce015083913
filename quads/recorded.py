"""Recorded rollouts of any engine: tokens and the log-probabilities that it reported for what it sampled.

JSONL, an object a line, or parquet, a row a rollout, with the fields that TRL's rollout functions return:
    prompt_ids [int], completion_ids [int], logprobs [float]    (further fields are ignored)
logprobs[i] is the natural log-probability of completion_ids[i] at the sampling temperature; give that temperature where
it is not 1. A file that breaks a rule is refused with the line (parquet: the row) and the rule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quads.attribution.batch import TokenBatch, pad

FIELDS = ("prompt_ids", "completion_ids", "logprobs")
MARGIN = 0.5  # nats: how much better a shifted alignment must fit before the file is called shifted
MIN_SHIFT_TOKENS = 8


@dataclass(frozen=True)
class Rollout:
    """One recorded rollout; `line` is where it stands in its file (from 1)."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    line: int

    @property
    def tokens(self) -> list[int]:
        return self.prompt_ids + self.completion_ids


def read(path: Path) -> list[Rollout]:
    """Every rollout of `path` (.jsonl or .parquet); ValueError names the line and the rule."""
    if path.suffix not in _READERS:
        raise ValueError(f"{path} is neither .jsonl nor .parquet: recorded rollouts are one of the two")
    if not path.is_file():
        raise ValueError(f"recorded rollouts {path} do not exist")
    rollouts = [_checked(fields, f"{path}:{line}", line) for line, fields in _READERS[path.suffix](path)]
    if not rollouts:
        raise ValueError(f"{path} holds no rollout")
    return rollouts


def to_batch(rollouts: list[Rollout]) -> TokenBatch:
    """The rollouts right-padded; only completion tokens count."""
    batch = pad([rollout.tokens for rollout in rollouts], [len(rollout.prompt_ids) for rollout in rollouts])
    recorded = torch.zeros(batch.counted.shape)
    for i, rollout in enumerate(rollouts):
        start = len(rollout.prompt_ids) - 1
        recorded[i, start : start + len(rollout.logprobs)] = torch.tensor(rollout.logprobs)
    return TokenBatch(batch.tokens, batch.real, batch.counted, recorded)


def limit(rollouts: list[Rollout], tokens: int) -> list[Rollout]:
    """The first rollouts that fit a padded batch of `tokens`; at least one."""
    longest, count = 0, 0
    for rollout in rollouts:
        longest = max(longest, len(rollout.tokens))
        if count and longest * (count + 1) > tokens:
            break
        count += 1
    return rollouts[:count]


def check_alignment(rollouts: list[Rollout], batch: TokenBatch, logps: torch.Tensor) -> None:
    """Raise ValueError, naming the line, where log-probabilities fit the model's only when shifted by one token.

    logps float32 [B, T-1]: the model's own. Engines and trainers disagree by far less than a shift makes.
    """
    assert batch.recorded is not None
    for i, rollout in enumerate(rollouts):
        keep = batch.counted[i]
        own, theirs = logps[i][keep], batch.recorded[i][keep]
        if own.numel() < MIN_SHIFT_TOKENS:
            continue
        straight = float((own - theirs).abs().mean())
        shifted = min(float((own[1:] - theirs[:-1]).abs().mean()), float((own[:-1] - theirs[1:]).abs().mean()))
        if shifted + MARGIN < straight:
            raise ValueError(
                f"recorded rollout at line {rollout.line}: log-probabilities do not belong to its tokens: mean gap"
                f" {straight:.3f} as given, {shifted:.3f} when shifted by one token"
            )


def _checked(fields: Any, where: str, line: int) -> Rollout:
    if not isinstance(fields, dict):
        raise ValueError(f"{where} is not an object with {', '.join(FIELDS)}")
    for name in FIELDS:
        if not isinstance(fields.get(name), list):
            raise ValueError(f"{where} has no list '{name}'")
    prompt, completion, logprobs = (fields[name] for name in FIELDS)
    for name, ids in (("prompt_ids", prompt), ("completion_ids", completion)):
        if not ids or not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise ValueError(f"{where}: {name} must be token ids (integers), at least one")
    if len(logprobs) != len(completion):
        raise ValueError(f"{where}: {len(completion)} completion tokens but {len(logprobs)} log-probs: one a token")
    for i, value in enumerate(logprobs):
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value > 0:
            raise ValueError(f"{where}: logprobs[{i}] is {value!r}: a log-probability is finite and not above 0")
    return Rollout(prompt, completion, [float(value) for value in logprobs], line)


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}:{number} is not JSON: {error}") from None


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow.parquet as parquet  # an optional reader: JSONL needs nothing
    except ImportError:
        raise ValueError(f"{path} needs pyarrow: python -m pip install pyarrow (or write JSONL)") from None
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from None
    for name in FIELDS:
        if name not in table.column_names:
            raise ValueError(f"{path} has no column '{name}'")
    yield from enumerate(table.select(list(FIELDS)).to_pylist(), start=1)


_READERS = {".jsonl": _jsonl, ".parquet": _parquet}
