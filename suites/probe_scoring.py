"""Log-probabilities of fixed tokens under whatever numerics the model is in: one forward, or step by step.

`prefill` scores all sequences in one teacher-forced forward: a RAC selection shared over the `batch` then sees every
token of every sequence at once, later ones too. `decode` feeds the completions token by token through the KV cache, as
a rollout does: a selection sees the rows of one position, and finished rows leave. Which of the two a probe used is
in its suite (`probe.scoring`); how much it matters is measured in docs/probe.md.

Padding takes no part in what a recipe shares over rows: the inputs of quantised layers are zero there, and a zero row
has no residual. (Under the scope `tile` such rows still fill places of a tile.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from quads.attribution.batch import TokenBatch
from quads.routing import record_routing, routers
from quads.sampling import cache_argument, left_pad

FORWARD_TOKENS = 32_768  # tokens of one forward: bounds memory, and is the widest batch that a selection is shared over


@dataclass(frozen=True)
class Scored:
    """Of every counted token, sequence after sequence.

    full float32 [N, V]: log-probabilities of the whole vocabulary; logps float32 [N]: those of the tokens themselves;
    experts int16 [N, routers, k], sorted along k, or None in a dense model: where the position that predicts the token
    was sent.
    """

    full: Tensor
    logps: Tensor
    experts: Tensor | None


Scorer = Callable[[nn.Module, TokenBatch, Iterable[nn.Module]], Scored]


@torch.no_grad()
def prefill(model: nn.Module, batch: TokenBatch, quantized: Iterable[nn.Module]) -> Scored:
    """Score `batch` (on the model's device) in one forward, or a few of FORWARD_TOKENS; `quantized`: modules whose
    input padding must not reach."""
    call, quantized, parts = model, list(quantized), []
    rows = max(1, FORWARD_TOKENS // batch.tokens.shape[1])
    for start in range(0, len(batch.tokens), rows):
        tokens, real, counted = (t[start : start + rows] for t in (batch.tokens, batch.real, batch.counted))
        with _silenced(quantized, real), _routing(model) as recorder:
            logits = call(input_ids=tokens, use_cache=False).logits
        where = counted.flatten().nonzero().squeeze(-1)  # of [rows, T-1]
        row, column = where // counted.shape[1], where % counted.shape[1]
        chosen = None if recorder is None else recorder(len(tokens))[row, column]
        parts.append(_scored(logits[row, column], tokens[row, column + 1], chosen))
    return _joined(parts)


@torch.no_grad()
def decode(model: nn.Module, batch: TokenBatch, quantized: Iterable[nn.Module]) -> Scored:
    """Score `batch` token by token through the KV cache: first all prompts, then the rows still going at each step."""
    call: Any = model
    quantized = list(quantized)
    lengths, totals = batch.counted.int().argmax(1) + 1, batch.real.sum(1)
    device, steps = batch.tokens.device, int((totals - lengths).max())
    prompts = [row[:length] for row, length in zip(batch.tokens.tolist(), lengths.tolist(), strict=True)]
    ids, mask = left_pad(prompts, 0, device)
    cache = DynamicCache(config=call.config)
    cached = {cache_argument(model): cache, "use_cache": True}
    rows, parts, order = torch.arange(len(ids), device=device), [], []
    first = (totals - lengths).cumsum(0) - (totals - lengths)  # of each row in the result
    for step in range(steps):
        with _silenced(quantized, mask[:, -ids.shape[1] :].bool()), _routing(model) as recorder:
            logits = call(input_ids=ids, attention_mask=mask, **cached).logits[:, -1]
        chosen = None if recorder is None else recorder(len(ids))[:, -1]
        tokens = batch.tokens[rows, lengths[rows] + step]
        parts.append(_scored(logits, tokens, chosen))
        order.append(first[rows] + step)
        kept = (totals[rows] - lengths[rows] > step + 1).nonzero().squeeze(-1)
        if len(kept) < len(rows):
            cache.batch_select_indices(kept)
            rows, tokens, mask = rows[kept], tokens[kept], mask[kept]
        ids, mask = tokens.unsqueeze(-1), torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
    return _joined(parts, torch.cat(order).argsort())


SCORERS: dict[str, Scorer] = {"prefill": prefill, "decode": decode}


def _scored(logits: Tensor, tokens: Tensor, experts: Tensor | None) -> Scored:
    full = logits.float().log_softmax(dim=-1)
    return Scored(full, full.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), experts)


def _joined(parts: list[Scored], order: Tensor | None = None) -> Scored:
    def joined(tensors: list[Tensor]) -> Tensor:
        whole = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        return whole if order is None else whole[order]

    experts = [part.experts for part in parts if part.experts is not None]
    full, logps = joined([part.full for part in parts]), joined([part.logps for part in parts])
    return Scored(full, logps, joined(experts) if experts else None)


@contextmanager
def _silenced(modules: list[nn.Module], real: Tensor) -> Iterator[None]:
    """Inside it padding (`real` bool, as many elements as the modules' inputs have rows) reaches `modules` as zero."""

    def silence(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        return (x * real.reshape(*x.shape[:-1], 1), *args[1:])

    hooks = [] if bool(real.all()) else [module.register_forward_pre_hook(silence) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _routing(model: nn.Module) -> Iterator[Callable[[int], Tensor] | None]:
    """Gives a function of the batch size that stacks what every router chose: int16 [B, T, routers, k], sorted."""
    if not routers(model):
        yield None
        return
    with record_routing(model) as recorder:
        yield (
            lambda batch: torch.stack(list(recorder.routing(batch).values()), dim=2).to(torch.int16).sort(dim=-1).values
        )
