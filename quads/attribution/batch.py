"""The token sequences that a diagnosis teacher-forces, and which of their log-probabilities count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MIN_TOKENS = 8


@dataclass(frozen=True)
class TokenBatch:
    """tokens int64 [B, T], right-padded; `real` bool [B, T] is False on padding.

    counted bool [B, T-1]: next tokens whose log-probability is compared; recorded float32 [B, T-1] or None: what a
    rollout engine reported for them.
    """

    tokens: Tensor
    real: Tensor
    counted: Tensor
    recorded: Tensor | None = None

    @property
    def count(self) -> int:
        return int(self.counted.sum())


def encode(tokenizer: Any, prompts: Sequence[str], max_tokens: int) -> TokenBatch:
    """The first `max_tokens` tokens of every prompt; each next token counts. ValueError names a prompt too short."""
    if tokenizer is None:
        raise ValueError("the model folder has no tokenizer: prompts cannot be turned into tokens")
    if not prompts:
        raise ValueError("no prompts: nothing to diagnose")
    if max_tokens < MIN_TOKENS:
        raise ValueError(f"max_tokens is {max_tokens}: at least {MIN_TOKENS} tokens a prompt are needed")
    rows = [tokenizer(prompt)["input_ids"][:max_tokens] for prompt in prompts]
    for number, row in enumerate(rows, start=1):
        if len(row) < MIN_TOKENS:
            raise ValueError(f"prompt {number} has {len(row)} tokens: at least {MIN_TOKENS} are needed")
    return pad(rows)


def pad(rows: Sequence[Sequence[int]], counted_from: Sequence[int] | None = None) -> TokenBatch:
    """Right-padded batch of token rows; row i counts the log-probabilities of its tokens from `counted_from[i]` on."""
    length = max(len(row) for row in rows)
    tokens, real = torch.zeros(len(rows), length, dtype=torch.int64), torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
        real[i, : len(row)] = True
    counted = real[:, 1:].clone()
    for i, start in enumerate(counted_from or []):
        counted[i, : start - 1] = False
    return TokenBatch(tokens, real, counted)


def check_vocabulary(batch: TokenBatch, size: int) -> None:
    """Raise ValueError, naming the row, where a token is outside a vocabulary of `size`."""
    bad = ((batch.tokens < 0) | (batch.tokens >= size)) & batch.real
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        token = int(batch.tokens[row, column])
        raise ValueError(f"sequence {row + 1} holds token {token} at {column}: the model knows 0 to {size - 1}")
