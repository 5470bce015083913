"""Log-probabilities out of a vLLM engine, for the gap meter.

RL compares the probability that a token was *sampled* with: `logprobs_mode="processed_logprobs"`, after temperature
and masks. Prompt log-probabilities never pass those processors, so they are comparable at temperature 1 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sampled(llm: Any, outputs: Sequence[Any]) -> list[Tensor]:
    """Log-probability (float32, [T]) of each sampled token of each completion in `outputs` of `llm.generate`.

    ValueError where the engine reports raw log-probabilities, or the request asked for none (`logprobs=0`).
    """
    mode = llm.llm_engine.model_config.logprobs_mode
    if mode != "processed_logprobs":
        raise ValueError(f"logprobs_mode is '{mode}': build the engine with logprobs_mode='processed_logprobs'")
    return [_of(choice.token_ids, choice.logprobs) for output in outputs for choice in output.outputs]


def teacher_forced(llm: Any, sequences: Sequence[Sequence[int]], *, together: bool = True) -> list[Tensor]:
    """Log-probability (float32, [T - 1]) of each next token of each sequence at temperature 1.

    `together` sends all sequences as one batch, else each alone: what differs is the engine's batch dependence.
    """
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": list(map(int, tokens))} for tokens in sequences]
    batches = [prompts] if together else [[prompt] for prompt in prompts]
    outputs = [o for batch in batches for o in llm.generate(batch, params, use_tqdm=False)]
    return [_of(o.prompt_token_ids[1:], o.prompt_logprobs[1:]) for o in outputs]


def _of(tokens: Sequence[int], logprobs: Any) -> Tensor:
    if logprobs is None:
        raise ValueError("the request asked for no log-probabilities: set logprobs=0 in its SamplingParams")
    return torch.tensor([entry[token].logprob for token, entry in zip(tokens, logprobs, strict=True)])
