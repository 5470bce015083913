"""Tiny random models of several families, seeded, for tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SHARED: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _MOE,
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 32},
    "mixtral": _LOCAL,
    "olmoe": _MOE,
    "deepseek_v3": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
        **{"first_k_dense_replace": 1, "n_shared_experts": 1, "kv_lora_rank": 16, "q_lora_rank": 16},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": 8},
    },
    "gpt_oss": {**_LOCAL, "layer_types": ["full_attention", "full_attention"], "intermediate_size": 32},
    "llama": {},
    "qwen3": {},
}


def tiny_model(family: str = "qwen3_moe", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random causal LM of `family` with K = 64 or 32 everywhere, in evaluation mode."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_SHARED, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 3:  # some expert tensors are left uninitialised by from_config
                parameter.normal_(0.0, 0.05)
    return model.eval()


def tokens(batch: int = 2, length: int = 12, *, seed: int = 1) -> torch.Tensor:
    """Random token ids of the tiny vocabulary."""
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(seed))
