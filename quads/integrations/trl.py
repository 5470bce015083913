"""QUADS under TRL's GRPOTrainer: sample under the rollout numerics, train under the trainer's, measure the gap.

    prepare_qat(model, recipe)
    rollout = QuadsRollout(recipe, seed=0)
    trainer = GRPOTrainer(model, ..., rollout_func=rollout, callbacks=[GapCallback(rollout)])

TRL compares the two sides only under vLLM, so the gap is measured here: after sampling and before any update, the
trainer's model scores the very tokens that the rollout sampled. Nothing is corrected: TRL corrects no rollout function
without vLLM. `quads.integrations.trl_trainer.QuadsTrainer` does, and measures on the trainer's own log-probabilities.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from quads.compute import Arithmetic
from quads.gap import GapMeter, token_logps
from quads.recipes import Recipe
from quads.rollout import Rollout, rollout_numerics
from quads.sampling import Completions, left_pad, sample

_ROUND_SEEDS = 1_000_003  # rounds of one seed draw apart from those of the next
# Options that reshape the sampled distribution, and the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "generation_kwargs": ({},),
}
_SCORED_TOKENS = 65_536  # tokens of one scoring forward, which bounds its memory


@dataclass(frozen=True)
class Measured:
    """What one rollout was: the gap (GapMeter.summary), completion tokens, seconds of sampling, scoring and sync."""

    round: int
    gap: dict[str, float]
    tokens: int
    sampling_seconds: float
    scoring_seconds: float
    mean_logp: float
    sync_seconds: float = 0.0


@dataclass
class QuadsRollout:
    """A `rollout_func` of GRPOTrainer. Temperature, length and group size are the trainer's; no top-k, no penalties.

    `round` counts rollouts; set it when a run resumes, since round and seed decide the sampling noise. `last` is what
    the latest rollout measured, `history` all of them. A `static` or `random` RAC selection is kept for
    `rac_refresh` rounds; a resume between two refreshes chooses it anew. arithmetic: of what the recipe leaves
    unquantised. measure: score the tokens here (a QuadsTrainer measures itself). routed: keep the experts that each
    token was sent to in `routing` (`SampledRouting.choices`).
    """

    recipe: Recipe
    seed: int = 0
    round: int = 0
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    measure: bool = True
    routed: bool = False
    history: list[Measured] = field(default_factory=list)
    routing: Tensor | None = None
    _numerics: Rollout | None = None
    _numerics_epoch: int = -1

    @property
    def last(self) -> Measured | None:
        return self.history[-1] if self.history else None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Sample a completion for each prompt (text or messages): `prompt_ids`, `completion_ids`, `logprobs`.

        ValueError names an option of GRPOConfig that would change the distribution and that no rollout here follows.
        """
        _check_options(trainer.args)
        model = trainer.accelerator.unwrap_model(trainer.model)
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        ids = prompt_ids(prompts, tokenizer)
        training = model.training
        model.eval()
        started = time.perf_counter()
        with self.arithmetic.on(model), self._context(model):
            completions = self._sample(model, ids, trainer, tokenizer)
        sampled = time.perf_counter()
        gap = self._gap(model, ids, completions, trainer, tokenizer) if self.measure else {}
        seconds = (sampled - started, time.perf_counter() - sampled)
        model.train(training)
        logps = [logp for row in completions.logps for logp in row]
        self.routing = completions.routing
        self.history.append(Measured(self.round, gap, len(logps), *seconds, sum(logps) / len(logps)))
        self.round += 1
        return {"prompt_ids": ids, "completion_ids": completions.tokens, "logprobs": completions.logps}

    def close(self) -> None:
        """Free what the rollout holds besides the trainer's model: nothing here."""

    def _gap(
        self, model: nn.Module, ids: list[list[int]], completions: Completions, trainer: Any, tokenizer: Any
    ) -> dict[str, float]:
        with trainer.accelerator.autocast():
            return score(model, ids, completions, tokenizer.pad_token_id, trainer.args.temperature).summary()

    def _sample(self, model: nn.Module, ids: list[list[int]], trainer: Any, tokenizer: Any) -> Completions:
        group = _group_size(ids, trainer.num_generations)
        return sample(
            model,
            ids[::group],
            samples=group,
            max_new_tokens=trainer.args.max_completion_length,
            eos=end_tokens(model, tokenizer),
            pad=tokenizer.pad_token_id,
            temperature=trainer.args.temperature,
            generator=torch.Generator().manual_seed(self.seed * _ROUND_SEEDS + self.round),
            routed=self.routed,
        )

    def _context(self, model: nn.Module) -> Rollout:
        epoch = self.round // self.recipe.rac_refresh
        if self._numerics is None or self._numerics_epoch != epoch:
            seed = self.seed * _ROUND_SEEDS + epoch
            self._numerics, self._numerics_epoch = rollout_numerics(model, self.recipe, seed=seed), epoch
        return self._numerics


def _check_options(args: Any) -> None:
    for name, neutral in _NEUTRAL.items():
        if getattr(args, name, None) not in (None, *neutral):
            raise ValueError(
                f"GRPOConfig.{name} is {getattr(args, name)!r}: a quads rollout samples by temperature alone"
            )


class GapCallback(TrainerCallback):
    """Adds the gap and the rollout's throughput of the latest rollout to the trainer's log history, step by step."""

    def __init__(self, rollout: QuadsRollout) -> None:
        self.rollout = rollout

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        measured = self.rollout.last
        if measured is None or logs is None:
            return
        added = {**measured.gap, "throughput/rollout_tokens_per_s": measured.tokens / measured.sampling_seconds}
        logs.update(added)
        if state.log_history:
            state.log_history[-1].update(added)


@torch.no_grad()
def score(
    model: nn.Module, prompts: list[list[int]], completions: Completions, pad: int, temperature: float = 1.0
) -> GapMeter:
    """The gap between `model` as it stands (the trainer) and the log-probabilities that the rollout gave.

    Prompts are padded left and completions right, as GRPOTrainer lays them out.
    """
    device = next(model.parameters()).device
    context, context_mask = left_pad(prompts, pad, device)
    longest = max(map(len, completions.tokens))
    tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in completions.tokens], device=device)
    rollout = torch.tensor([row + [0.0] * (longest - len(row)) for row in completions.logps], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in completions.tokens], device=device)
    ids, attention = torch.cat([context, tokens], -1), torch.cat([context_mask, mask], -1)
    meter, call = GapMeter(), model
    rows = max(1, _SCORED_TOKENS // ids.shape[1])
    for part in (slice(start, start + rows) for start in range(0, len(ids), rows)):
        output = call(input_ids=ids[part], attention_mask=attention[part], logits_to_keep=longest + 1)
        trainer = token_logps(output.logits, ids[part][:, -longest - 1 :], temperature)
        meter.update(trainer, rollout[part], mask[part])
    return meter


def prompt_ids(prompts: list[Any], tokenizer: Any) -> list[list[int]]:
    """Token ids of text prompts (each different one is tokenised once), or of messages through the chat template."""
    if isinstance(prompts[0], str):
        different = list(dict.fromkeys(prompts))
        found = dict(zip(different, tokenizer(different)["input_ids"], strict=True))
        return [list(found[prompt]) for prompt in prompts]
    return [
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        for prompt in prompts
    ]


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a completion: the generation config's and the tokenizer's."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = configured if isinstance(configured, list) else [configured]
    return tuple({token for token in [*ends, tokenizer.eos_token_id] if token is not None})


def _group_size(ids: list[list[int]], samples: int) -> int:
    """`samples` where the prompts come in runs of that many equal ones (how GRPOTrainer repeats them), else 1."""
    whole = len(ids) % samples == 0
    equal = whole and all(ids[row] == ids[row - row % samples] for row in range(len(ids)))
    return samples if equal else 1
