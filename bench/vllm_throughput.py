"""One arm of the throughput comparison: layers of Qwen3-30B-A3B with the same random weights and prompts for all arms.

Arms start side by side, which costs most of the time, and are measured one after the other: `run` says READY and waits
for a line before each pass. Weights never touch a disk: a loader hands vLLM the tensors of a checkpoint as it asks for
them, in bfloat16 or, for NVFP4 Marlin, packed by this project's quantiser under the names that `quads export` writes.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads import recipes
from quads.bench import vllm_engines as engines
from quads.emulation.checkpoints import COMPRESSED_TENSORS, to_divisor
from quads.export import quantization_config

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
LONGEST = 2048  # prompt and completion together
_MIXED = 128  # requests of the mixed load


@dataclass(frozen=True)
class Arm:
    """vLLM's own path (`options`), a recipe of the plugin, or packed weights for vLLM's NVFP4."""

    options: dict[str, Any] = field(default_factory=dict)
    recipe: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    environment: dict[str, str] = field(default_factory=dict)


_FP8 = {"quantization": "fp8_per_block"}
ARMS = {
    "bf16": Arm(),
    "fp8": Arm(options=_FP8),
    "nvfp4-marlin": Arm(packed=True),
    "quads-static": Arm(recipe="quads", changes={"rac_scope": "static"}),
    "nvfp4": Arm(recipe="nvfp4"),
    "quads-batch": Arm(recipe="quads"),
    "quads-token": Arm(recipe="quads", changes={"rac_scope": "token"}),
    "fp8-triton": Arm(options=_FP8, environment={"VLLM_USE_DEEP_GEMM": "0"}),
}
CASES = tuple(ARMS)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)  # batches of CUDA graphs, the same for every arm


def shape() -> dict[str, Any]:
    return SHAPE if engines.device() == "cuda" else {**SHAPE, **SMALL}


def environment(case: str) -> dict[str, str]:
    return ARMS[case].environment


def run(case: str, layers: int, batches: list[int], repeats: int) -> dict[str, Any]:
    """Start, wait, measure; then wait and refit, as the parent asks (`measure`, `refit`, anything else ends)."""
    started = time.perf_counter()
    llm = _start(ARMS[case], layers, batches)
    result: dict[str, Any] = {"start_s": round(time.perf_counter() - started, 1), "weights_gib": _weights_gib(llm)}
    passes: dict[str, Callable[[], dict[str, Any]]] = {
        "measure": lambda: measured(llm, batches, repeats),
        "refit": lambda: refitted(llm, ARMS[case], layers),
    }
    print("READY", flush=True)
    for line in sys.stdin:
        if line.strip() not in passes:
            break
        result |= passes[line.strip()]()
        result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else 0.0
        _say("DONE", result)
    return result


def _say(word: str, result: dict[str, Any]) -> None:
    print(f"{word} {json.dumps(result)}", flush=True)


def _start(arm: Arm, layers: int, batches: list[int]) -> Any:
    from quads.integrations.vllm import register

    if arm.recipe:
        register()
    _register_loader()
    config: dict[str, Any] = {**shape(), "num_hidden_layers": layers}
    if arm.recipe:
        recipe = recipes.load(arm.recipe).replace(**arm.changes)
        config["quantization_config"] = {"quant_method": "quads", "recipe": recipe.to_dict()}
    if arm.packed:
        ignored = [name for layer in range(layers) for name in _plain_names(layer)]
        w4a16, style = recipes.load("w4a16"), COMPRESSED_TENSORS.name
        config["quantization_config"] = quantization_config(w4a16, [*ignored, "lm_head"], style)
    load = {"layers": layers, "packed": arm.packed, "seed": 1}
    kv_bytes = 160_000 * layers * 2 * 4 * 128 * 2
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options = {
            "load_format": "random_checkpoint",
            "model_loader_extra_config": load,
            "max_model_len": LONGEST + 16,
            "max_num_seqs": max(*batches, 8),
            "max_num_batched_tokens": 8192,
            "kv_cache_memory_bytes": kv_bytes,
            "compilation_config": {"cudagraph_capture_sizes": [n for n in _SIZES if n <= max(batches)]},
        }
        return engines.start(Path(folder), **options, **arm.options)


def _plain_names(layer: int) -> list[str]:
    prefix = f"model.layers.{layer}"
    return [f"{prefix}.mlp.gate", *(f"{prefix}.self_attn.{part}_proj" for part in "qkvo")]


def _register_loader() -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class RandomCheckpoint(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

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


def measured(llm: Any, batches: list[int], repeats: int) -> dict[str, Any]:
    """Output tokens a second: equal requests of each batch size, and one mixed load; medians after one warm-up."""
    rates: dict[str, float] = {}
    for batch in batches:
        rates[str(batch)] = _rate(llm, *_equal(batch), repeats)
        _say("SOME", {"tokens_per_s": rates})
    rates["mixed"] = _rate(llm, *_mixed(), max(1, repeats - 1), warm=False)
    return {"tokens_per_s": rates}


def _equal(batch: int) -> tuple[list[list[int]], list[int]]:
    """`batch` prompts of 128 tokens, 128 tokens out each."""
    generator = random.Random(batch)
    return [[generator.randrange(shape()["vocab_size"]) for _ in range(128)] for _ in range(batch)], [128] * batch


def _mixed() -> tuple[list[list[int]], list[int]]:
    """Requests of 64 to 1024 tokens in, 128 to 1024 out."""
    generator = random.Random(0)
    prompts = [
        [generator.randrange(shape()["vocab_size"]) for _ in range(generator.randint(64, 1024))] for _ in range(_MIXED)
    ]
    return prompts, [generator.randint(128, 1024) for _ in range(_MIXED)]


def _rate(llm: Any, prompts: list[list[int]], lengths: list[int], repeats: int, *, warm: bool = True) -> float:
    from vllm import SamplingParams

    params = [
        SamplingParams(max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False, temperature=1.0) for n in lengths
    ]
    requests = [{"prompt_token_ids": row} for row in prompts]
    seconds = []
    for _ in range(repeats + warm):
        started = time.perf_counter()
        llm.generate(requests, params, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    return round(sum(lengths) / statistics.median(seconds[warm:]), 1)


def refitted(llm: Any, arm: Arm, layers: int) -> dict[str, Any]:
    """Seconds of the second and third of three refits (A, B, A) from tensors of the GPU, and whether both A agree."""
    from quads.integrations.vllm_plugin.logprobs import teacher_forced

    prompts = [[7 * i + j for j in range(32)] for i in range(8)]
    seen, seconds = [], []
    try:
        for seed in (1, 2, 1):
            weights = list(checkpoint(layers, seed, packed=arm.packed))
            _wait()
            started = time.perf_counter()
            _refit(llm, arm, weights)
            _wait()
            seconds.append(round(time.perf_counter() - started, 3))
            seen.append(torch.cat(teacher_forced(llm, prompts, together=False)))
            del weights
    except Exception as error:  # a peer that cannot be refitted is a result, not a failure of the run
        return {"refit_error": f"{type(error).__name__}: {str(error)[:200]}", "refit_s": seconds}
    return {
        "refit_s": seconds,
        "aba_equal": torch.equal(seen[0], seen[2]),
        "ab_differ": float((seen[0] - seen[1]).abs().mean()),
        "finite": bool(seen[0].isfinite().all()),
    }


def _refit(llm: Any, arm: Arm, weights: list[tuple[str, Tensor]]) -> None:
    """The plugin's transaction, or vLLM's own reload for the peers."""
    if arm.recipe:
        from quads.integrations.vllm import refit

        refit(llm, weights)
    else:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _weights_gib(llm: Any) -> float:
    def size(model: Any) -> int:
        return sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)

    return round(llm.apply_model(size)[0] / 2**30, 2)
