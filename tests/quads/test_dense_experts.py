"""Experts as batched products compute what transformers' own loop does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from quads import dense_experts
from quads.compute import AS_LOADED, ROLLOUT, TRAINER, Implementation, implementation
from tests.quads.tiny import tiny_model, tokens


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss"])
def test_the_logits_are_those_of_an_expert_at_a_time(family: str) -> None:
    """Two sums of the same float32 products in another order: 2^-16 is far above the last places of logits below 8."""
    model = tiny_model(family)
    with torch.no_grad(), implementation(model, Implementation(experts="eager")):
        expected = model(tokens(2, 12)).logits
    with torch.no_grad(), implementation(model, Implementation(experts=ROLLOUT.experts)):
        dense = model(tokens(2, 12)).logits
    assert (dense - expected).abs().max() < 2.0**-16


def test_it_runs_where_it_is_asked_for_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    dense_experts.register()
    calls: list[torch.Size] = []

    def spy(module: Any, hidden: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        calls.append(hidden.shape)
        return dense_experts.forward(module, hidden, *routing)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, dense_experts.NAME, spy)
    model = tiny_model()
    with torch.no_grad():
        for chosen in (TRAINER, AS_LOADED):
            with implementation(model, chosen):
                model(tokens(2, 12))
        assert calls == []
        with implementation(model, ROLLOUT):
            model(tokens(2, 12))
    assert calls == [torch.Size([24, 64])] * 2  # both layers


def test_a_wrong_expert_weight_changes_the_answer() -> None:
    model = tiny_model()
    with torch.no_grad(), implementation(model, ROLLOUT):
        before = model(tokens(2, 12)).logits
        model.model.layers[0].mlp.experts.down_proj[1] *= 2
        assert not torch.equal(model(tokens(2, 12)).logits, before)
