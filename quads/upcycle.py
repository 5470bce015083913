"""A mixture of experts made of a dense model, with the same function: for evidence on routed layers from real weights.

Construction. Attention, norms, embeddings and head are copied. Every expert of a layer is a copy of that layer's MLP,
and the router is Gaussian noise, so that tokens spread over experts by chance ("noise-broken" symmetry).
All experts answer y, so the block answers sum(w_i) * y with sum(w_i) = 1: the dense function, up to

    |moe(x) - y| <= ((1 + u)^(k + 1) (1 + k 2^-23) - 1) |y|       elementwise, for the same y

u is the dtype's unit roundoff (2^-8 for bfloat16): each of the k routing weights is rounded once, each product and
each of the k - 1 sums once; the weights themselves sum to 1 within k 2^-23 (float32 softmax). With k = 1 it is exact.
What it is not: experts do not specialise, so a flipped routing choice costs nothing here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

FAMILIES = ("llama", "mistral")
ROUTER_STD = 0.05


def upcycle(model: nn.Module, *, experts: int = 4, top_k: int = 2, seed: int = 0) -> MixtralForCausalLM:
    """A Mixtral with `experts` copies of each MLP of the dense Llama or Mistral `model`, `top_k` of them active.

    ValueError where the family, a bias or the counts do not allow it. `model` is not changed.
    """
    config: Any = model.config
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"cannot upcycle a '{config.model_type}': its attention must be Llama's ({', '.join(FAMILIES)})"
        )
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k}: it must be between 1 and the number of experts, {experts}")
    biased = [name for name, _ in model.named_parameters() if name.endswith(".bias")]
    if biased:
        raise ValueError(f"cannot upcycle {biased[0]}: a Mixtral has no biases")
    moe = MixtralForCausalLM(_config(config, experts, top_k)).to(next(model.parameters()).dtype)
    _copy(model, moe, experts, seed)
    return moe.eval()


def _config(dense: Any, experts: int, top_k: int) -> MixtralConfig:
    shared = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
        " hidden_act max_position_embeddings rms_norm_eps rope_parameters tie_word_embeddings"
        " bos_token_id eos_token_id pad_token_id"
    )
    fields = {name: getattr(dense, name) for name in shared.split()}
    return MixtralConfig(**fields, num_local_experts=experts, num_experts_per_tok=top_k, sliding_window=None)


@torch.no_grad()
def _copy(model: nn.Module, moe: nn.Module, experts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    source = dict(model.named_parameters(remove_duplicate=False))
    for name, target in moe.named_parameters(remove_duplicate=False):
        if name.endswith(".mlp.gate.weight"):
            target.copy_(torch.randn(target.shape, generator=generator) * ROUTER_STD)
        elif name.endswith(".experts.gate_up_proj"):
            parent = name.removesuffix("experts.gate_up_proj")
            both = [source[f"{parent}{part}.weight"] for part in ("gate_proj", "up_proj")]
            target.copy_(torch.cat(both).expand(experts, -1, -1))
        elif name.endswith(".experts.down_proj"):
            target.copy_(source[name.replace("experts.down_proj", "down_proj.weight")].expand(experts, -1, -1))
        else:
            target.copy_(source[name])
