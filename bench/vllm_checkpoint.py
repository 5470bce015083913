"""Layers of Qwen3-30B-A3B with random weights, handed to vLLM as a checkpoint that never touches a disk.

In bfloat16 or, for vLLM's own NVFP4, packed by this project's quantiser under the names that `quads export` writes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from quads.bench import vllm_engines as engines
from quads.emulation.checkpoints import COMPRESSED_TENSORS, to_divisor

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 8192,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# What a machine without a GPU serves instead, to try the script.
SMALL = {"vocab_size": 512, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
SMALL |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "intermediate_size": 512}


def shape() -> dict[str, Any]:
    return SHAPE if engines.device() == "cuda" else {**SHAPE, **SMALL}


def plain_names(layer: int) -> list[str]:
    """Matrices of a layer that stay in full precision beside packed experts."""
    prefix = f"model.layers.{layer}"
    return [f"{prefix}.mlp.gate", *(f"{prefix}.self_attn.{part}_proj" for part in "qkvo")]


def register_loader() -> None:
    """Register the load format `random_checkpoint`; its extra config holds the arguments of `checkpoint`."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class RandomCheckpoint(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            with FileLock(Path(tempfile.gettempdir()) / "vllm-loading.lock"):  # arms start together, load in turn
                model = super().load_model(*args, **kwargs)
                torch.accelerator.empty_cache()
                return model

        def load_weights(self, model: Any, model_config: Any) -> None:
            extra = self.load_config.model_loader_extra_config
            model.load_weights(checkpoint(extra["layers"], extra["seed"], packed=extra["packed"]))

    register_model_loader("random_checkpoint")(RandomCheckpoint)


def checkpoint(layers: int, seed: int, *, packed: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Random weights of the whole model under checkpoint names, the same for the same seed; packed experts if asked."""
    generator = torch.Generator(device=engines.device()).manual_seed(seed)
    size = shape()
    hidden, inner, head, count = (size[k] for k in ("hidden_size", "moe_intermediate_size", "head_dim", "num_experts"))
    heads, kv = size["num_attention_heads"], size["num_key_value_heads"]

    def tensor(*shape: int) -> Tensor:
        empty = torch.empty(shape, dtype=torch.bfloat16, device=engines.device())
        return empty.normal_(0.0, 0.02, generator=generator)

    yield "model.embed_tokens.weight", tensor(size["vocab_size"], hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q_proj", heads * head), ("k_proj", kv * head), ("v_proj", kv * head)):
            yield f"{prefix}.self_attn.{name}.weight", tensor(rows, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", tensor(hidden, heads * head)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            yield f"{prefix}.{name}.weight", 1 + tensor(head)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", 1 + tensor(hidden)
        yield f"{prefix}.mlp.gate.weight", tensor(count, hidden)
        for expert in range(count):
            gate, up, down = tensor(inner, hidden), tensor(inner, hidden), tensor(hidden, inner)
            base = f"{prefix}.mlp.experts.{expert}"
            for parts in ({"gate_proj": gate, "up_proj": up}, {"down_proj": down}):
                yield from _expert(base, parts, packed)
    yield "model.norm.weight", 1 + tensor(hidden)
    yield "lm_head.weight", tensor(size["vocab_size"], hidden)


def _expert(base: str, parts: dict[str, Tensor], packed: bool) -> Iterator[tuple[str, Tensor]]:
    """The tensors of matrices that share one outer scale."""
    if not packed:
        yield from ((f"{base}.{name}.weight", weight) for name, weight in parts.items())
        return
    from quads.kernels.quantize import quantize

    amax = torch.stack([weight.abs().amax() for weight in parts.values()]).amax().float()
    outer = amax / amax.new_full((), 2688.0)
    for name, weight in parts.items():
        q, style = quantize(weight, outer), COMPRESSED_TENSORS
        yield f"{base}.{name}.{style.weight}", q.packed
        yield f"{base}.{name}.{style.scale}", q.scales.view(torch.float8_e4m3fn)
        yield f"{base}.{name}.{style.outer}", to_divisor(outer).reshape(1)
