"""Batched sampling with a KV cache, log-probabilities and paired randomness.

Each prompt is prefilled once and its cache shared by its samples; finished rows leave the batch, so padding takes no
part in what a recipe shares over a batch. The token at position t of sample i depends on the logits and on the noise
of (t, i) alone: two policies given the same generator state meet the same noise, which pairs the arms of a comparison.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from quads.routing import SampledRouting, record_routing


@dataclass(frozen=True)
class Completions:
    """Samples in prompt order, `samples` of each prompt together; a row's end-of-sequence token is its last.

    `routing`: where it was asked for, `SampledRouting.choices` of prompts and completions.
    """

    tokens: list[list[int]]
    logps: list[list[float]]
    routing: Tensor | None = None


def left_pad(prompts: list[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask (int64, [prompts, longest]), padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: list[list[int]],
    *,
    samples: int,
    max_new_tokens: int,
    eos: tuple[int, ...],
    pad: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    routed: bool = False,
) -> Completions:
    """`samples` completions of each prompt (token ids, none empty); temperature 0 is greedy and needs no generator.

    `generator` lives on the CPU. Log-probabilities are of the tempered distribution, float32. `routed`: record which
    experts every token was sent to.
    """
    device = next(model.parameters()).device
    ids, mask = left_pad(prompts, pad, device)
    total, width = ids.shape[0] * samples, ids.shape[1]
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    call: Any = model
    cache = DynamicCache(config=call.config)
    cached = {cache_argument(model): cache, "use_cache": True}
    with record_routing(model) if routed else nullcontext() as recorder:
        routing = SampledRouting(recorder, model, width + max_new_tokens) if recorder is not None else None
        result = call(input_ids=ids, attention_mask=mask, logits_to_keep=1, **cached)
        if routing is not None:
            routing.prefill(mask, samples)
        logits = result.logits[:, -1].repeat_interleave(samples, 0)
        cache.batch_repeat_interleave(samples)
        mask = mask.repeat_interleave(samples, 0)
        rows = torch.arange(total, device=device)
        ends = torch.tensor(eos, device=device)
        for position in range(max_new_tokens):
            tokens, logps = _choose(logits, rows, total, temperature, generator)
            steps.append((rows, tokens, logps))
            kept = (~torch.isin(tokens, ends)).nonzero().squeeze(-1)  # the one wait for the device in a step
            if position + 1 == max_new_tokens or len(kept) == 0:
                break
            if len(kept) < len(rows):
                cache.batch_select_indices(kept)
                rows, tokens, mask = rows[kept], tokens[kept], mask[kept]
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=-1)
            logits = call(input_ids=tokens.unsqueeze(-1), attention_mask=mask, **cached).logits[:, -1]
            if routing is not None:
                routing.decode(rows, width + position)
    tokens_of, logps_of = _by_row(steps, total)
    return Completions(tokens_of, logps_of, None if routing is None else routing.choices)


def _by_row(steps: list[tuple[Tensor, Tensor, Tensor]], total: int) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and log-probabilities of each row, from what each step gave to the rows still in the batch."""
    tokens: list[list[int]] = [[] for _ in range(total)]
    logps: list[list[float]] = [[] for _ in range(total)]
    of_row, token, logp = (torch.cat(part).tolist() for part in zip(*steps, strict=True))
    for row, value, log in zip(of_row, token, logp, strict=True):
        tokens[row].append(value)
        logps[row].append(log)
    return tokens, logps


def cache_argument(model: nn.Module) -> str:
    """transformers renamed `past_key_values` to `cache` in 5.24."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def _choose(
    logits: Tensor, rows: Tensor, total: int, temperature: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Gumbel-max: the argmax of logits plus noise is a sample of the softmax."""
    scaled = logits.float() / (temperature or 1.0)
    logps = torch.log_softmax(scaled, dim=-1)
    if temperature == 0:
        tokens = scaled.argmax(dim=-1)
    else:
        # Noise for every sample, finished ones too: the draw must not depend on who has finished.
        uniform = torch.rand(total, logits.shape[-1], generator=generator, dtype=torch.float64)
        noise = -torch.log(-torch.log(uniform.clamp_min(1e-300)))
        tokens = (logps.double() + noise.to(logits.device)[rows]).argmax(dim=-1)
    return tokens, logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
