"""What the vLLM script of the GPU serves: a tiny random MoE, layers of Qwen3-30B-A3B, and its engines' options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from quads.recipes import Recipe

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    "HF_HUB_OFFLINE": "1",
}
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_GIB = 1 << 30


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def tiny(seed: int) -> Any:
    """A random Qwen3-MoE in bfloat16 whose logits are far from uniform, in evaluation mode."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**TINY), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.08)
    return model.eval().to(device())


def tokens(rows: int, length: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, TINY["vocab_size"], (rows, length), generator=generator).tolist()


def serve(model: Any, recipe: Recipe, folder: Path, **options: Any) -> Any:
    """An engine with the plugin over `model` under `recipe`."""
    from quads.integrations.vllm import register
    from quads.integrations.vllm_plugin.colocate import engine_folder

    register()  # the entry point does it where the package is installed
    return start(engine_folder(model, recipe, folder), **options)


def start(folder: Path, **options: Any) -> Any:
    """`vllm.LLM` over `folder`, small enough that several share a GPU; CUDA graphs on where there is one."""
    from vllm import LLM

    fixed: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    if device() == "cuda":
        fixed["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
        fixed |= {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": _GIB}
    else:
        fixed["enforce_eager"] = True
    return LLM(model=str(folder), **{**fixed, **options})


def generated(llm: Any, prompts: list[list[int]], length: int, *, seed: int | None = 0) -> list[dict[str, Any]]:
    """`tokens` and their `logps` of each prompt; greedy where `seed` is None."""
    from vllm import SamplingParams

    from quads.integrations.vllm_plugin.logprobs import sampled

    fixed: dict[str, Any] = {"max_tokens": length, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    params = [
        SamplingParams(**fixed, temperature=0.0 if seed is None else 1.0, seed=None if seed is None else seed + row)
        for row in range(len(prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": row} for row in prompts], params, use_tqdm=False)
    logps = sampled(llm, outputs)
    return [{"tokens": list(o.outputs[0].token_ids), "logps": p} for o, p in zip(outputs, logps, strict=True)]


def batch_dependence(llm: Any, sequences: list[list[int]]) -> dict[str, Any]:
    """The same sequences together and each alone: teacher-forced, and greedy completions of their beginnings."""
    from quads.integrations.vllm_plugin.logprobs import teacher_forced

    together, alone = (torch.cat(teacher_forced(llm, sequences, together=both)) for both in (True, False))
    prompts = [row[:16] for row in sequences[:8]]
    many = generated(llm, prompts, 32, seed=None)
    one = [generated(llm, [prompt], 32, seed=None)[0] for prompt in prompts]
    return {
        "prefill": spread(together - alone),
        "decode": spread(torch.cat([_shared(x, y) for x, y in zip(many, one, strict=True)])),
        "same_tokens": sum(x["tokens"] == y["tokens"] for x, y in zip(many, one, strict=True)),
    }


def _shared(x: dict[str, Any], y: dict[str, Any]) -> torch.Tensor:
    """Difference of log-probabilities before two completions part."""
    same = [a == b for a, b in zip(x["tokens"], y["tokens"], strict=True)]
    length = same.index(False) if False in same else len(same)
    return x["logps"][:length] - y["logps"][:length]


def spread(difference: torch.Tensor) -> dict[str, float]:
    """Mean, 99th percentile and maximum of |difference|, with the number of tokens."""
    size = difference.abs().float().flatten()
    if not size.numel():
        return {"mean": 0.0, "p99": 0.0, "max": 0.0, "tokens": 0}
    return {
        "mean": float(size.mean()),
        "p99": float(size.quantile(0.99)),
        "max": float(size.max()),
        "tokens": size.numel(),
    }
