"""GRPOTrainer for a QuadsRollout: the gap of the trainer's own log-probabilities, truncated weights (TIS), replay (R3).

TRL corrects importance only under its vLLM mode. Here, after sampling and before any update:
* the trainer's log-probabilities of the sampled tokens are those that TRL itself computes for the ratio (its
  `old_per_token_logps`), so the gap is that of the numbers that train, and costs no forward pass of its own;
* TIS multiplies each token's loss by w = min(exp(log pi_trainer - log pi_rollout), cap). GRPO's loss of a token is
  -min(c A, clip(c) A), so for w > 0 weighting the loss is weighting the advantage, and TRL takes advantages a token;
* R3 sends each token, in that scoring and in every training pass, to the experts that the rollout chose. Choices travel
  as one tensor [rows, T, routers, k] in TRL's batch, so its shuffle and its minibatches move them with their rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import trl
from torch import Tensor, nn

from quads.compute import Arithmetic
from quads.correction import tis_weights
from quads.gap import GapMeter
from quads.integrations.trl import QuadsRollout
from quads.routing import as_routing, replay_routing

_Scores = tuple[Tensor, Tensor | None, Tensor | None]


class QuadsTrainer(trl.GRPOTrainer):
    """`GRPOTrainer(..., rollout_func=rollout)` with corrections.

    tis: cap of the importance weights, 0 for none. arithmetic: of every forward pass of the trainer. Routing is
    replayed where the rollout is `routed`. After each rollout `rollout.last.gap` holds the gap, and `corrected` the
    weights' mean and the share of tokens at the cap.
    """

    def __init__(
        self, *args: Any, rollout_func: QuadsRollout, tis: float = 0.0, arithmetic: Arithmetic, **options: Any
    ) -> None:
        self.rollout, self.tis, self.arithmetic = rollout_func, tis, arithmetic
        self.rollout.measure = False
        self.corrected: dict[str, float] = {}
        self._routing: Tensor | None = None  # of the rows that the next forward passes see
        super().__init__(*args, rollout_func=rollout_func, **options)

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        self._routing = self.rollout.routing
        return generated

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        if "old_per_token_logps" not in batch:  # TRL leaves it out where one update follows each rollout
            batch["old_per_token_logps"] = self._score(batch)
        if self._routing is not None:
            batch["routing"] = self._routing
        self._measure(batch)
        if self.tis:
            self._correct(batch)
        return batch

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        self._routing = inputs.get("routing")
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> _Scores:
        size = batch_size or len(input_ids)
        parts = []
        for rows in (slice(start, start + size) for start in range(0, len(input_ids), size)):
            with self._forward(model, rows, input_ids.shape[1]):
                parts.append(
                    super()._get_per_token_logps_and_entropies(
                        model, input_ids[rows], attention_mask[rows], logits_to_keep, **options
                    )
                )
        logps, entropies, losses = zip(*parts, strict=True)
        return torch.cat(logps), _joined(entropies), None if losses[0] is None else torch.stack(losses).mean()

    @contextmanager
    def _forward(self, model: nn.Module, rows: slice, length: int) -> Iterator[None]:
        """The trainer's arithmetic, and the rollout's routing of `rows` where there is one."""
        model = self.accelerator.unwrap_model(model)
        with self.arithmetic.on(model):
            if self._routing is None:
                yield
                return
            with replay_routing(model, as_routing(model, self._routing[rows, :length])):
                yield

    @torch.no_grad()
    def _score(self, batch: dict[str, Any]) -> Tensor:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        size = self.args.per_device_train_batch_size
        return self._get_per_token_logps_and_entropies(self.model, ids, mask, batch["completion_ids"].shape[1], size)[0]

    def _measure(self, batch: dict[str, Any]) -> None:
        started, meter = time.perf_counter(), GapMeter()
        meter.update(batch["old_per_token_logps"], batch["sampling_per_token_logps"], batch["completion_mask"])
        gap, last = meter.summary(), self.rollout.history[-1]
        self.rollout.history[-1] = replace(last, gap=gap, scoring_seconds=time.perf_counter() - started)
        for name, value in gap.items():
            self._metrics["train"][name].append(value)

    def _correct(self, batch: dict[str, Any]) -> None:
        mask = batch["completion_mask"]
        pair = batch["old_per_token_logps"], batch["sampling_per_token_logps"]
        weights = tis_weights(*pair, mask, cap=self.tis)
        batch["advantages"] = batch["advantages"].unsqueeze(1) * weights
        kept = weights[mask.bool()]
        self.corrected = {
            "correction/tis_mean": float(kept.mean()),
            "correction/tis_capped": float((kept >= self.tis).float().mean()),
        }


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
