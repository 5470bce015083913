"""Rollout throughput of vLLM on one GPU: bf16, FP8, NVFP4 Marlin (W4A16) and this project's recipes, in one run.

    PYTHONPATH=.:SITE python bench/h200_vllm.py --json h200_vllm.json

Qwen3-30B-A3B's layers (hidden 2048, 128 experts, top-8, moe intermediate 768, 32 heads, 4 KV heads of 128), as many as
`--layers`, dummy weights, the same random prompts for every arm, CUDA graphs on, one process an arm. Reports output
tokens/s (prefill included, medians), memory of the weights, seconds of a refit, and whether an A-B-A refit gives the
same log-probabilities. The goals stand beside the ratios. Each arm's own best configuration is vLLM's default for it:
DeepGEMM where it is found, Marlin for NVFP4 on Hopper.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
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
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
_MARLIN = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {**_NVFP4, "dynamic": False}, "format": "nvfp4-pack-quantized"}
    },
}
ARMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8_per_block"},
    "nvfp4-marlin": {"hf_overrides": {"quantization_config": _MARLIN}},
    "nvfp4": {"hf_overrides": {"quantization_config": {"quant_method": "quads", "recipe": "nvfp4"}}},
    "quads": {"hf_overrides": {"quantization_config": {"quant_method": "quads", "recipe": "quads"}}},
}
GOALS = (("quads", "fp8", 1.16), ("quads", "nvfp4-marlin", 1.0), ("quads", "nvfp4", 0.92))


def main() -> None:
    """Run the arms one after the other, print the table, write JSON."""
    options = _parser().parse_args()
    if options.arm:
        print("RESULT " + json.dumps(measure(options)), flush=True)
        return
    results = {arm: _in_process(arm) for arm in options.arms.split(",")}
    print(table(results, options.batches))
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "arms": results}, indent=1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--arm", default="", help="measure one arm in this process")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batches", default="1,32,128,256")
    parser.add_argument("--tokens-in", type=int, default=128)
    parser.add_argument("--tokens-out", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-refit", action="store_true")
    parser.add_argument("--json", default="")
    return parser


def _in_process(arm: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm]
    run = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    if lines:
        print(f"{arm}: {lines[-1][7:]}", flush=True)
        return json.loads(lines[-1][7:])
    reason = [line for line in run.stderr.splitlines() if line.strip()][-15:]
    print(f"{arm} failed:\n" + "\n".join(reason), flush=True)
    return {"error": reason[-1] if reason else f"exit {run.returncode}"}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One arm: start, throughput at each batch, memory, refit."""
    import torch
    from vllm import LLM

    from quads.integrations.vllm import register

    register()  # the entry point does it where the package is installed
    batches = [int(batch) for batch in options.batches.split(",")]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = {**SHAPE, "num_hidden_layers": options.layers}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=options.tokens_in + options.tokens_out + 16,
            max_num_seqs=max(batches),
            gpu_memory_utilization=0.6,
            enable_prefix_caching=False,
            logprobs_mode="processed_logprobs",
            compilation_config={"cudagraph_capture_sizes": sorted(set(batches))},
            **ARMS[options.arm],
        )
    result: dict[str, Any] = {"start_s": round(time.perf_counter() - started, 1), "gpu": torch.cuda.get_device_name()}
    result["weights_gib"] = round(_weights_gib(llm), 2)
    result["tokens_per_s"] = {str(batch): round(throughput(llm, batch, options), 1) for batch in batches}
    result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if not options.no_refit:
        result |= _refit(llm, options)
    return result


def throughput(llm: Any, batch: int, options: argparse.Namespace) -> float:
    """Output tokens a second of `batch` requests, median over repeats after one warm-up."""
    from vllm import SamplingParams

    generator = random.Random(batch)
    params = SamplingParams(
        max_tokens=options.tokens_out, min_tokens=options.tokens_out, ignore_eos=True, detokenize=False, temperature=1.0
    )
    prompts = [
        {"prompt_token_ids": [generator.randrange(1000, 150000) for _ in range(options.tokens_in)]}
        for _ in range(batch)
    ]
    seconds = []
    for _ in range(options.repeats + 1):
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    return batch * options.tokens_out / statistics.median(seconds[1:])


def checkpoint(layers: int, seed: int) -> Iterator[tuple[str, Any]]:
    """Random weights of the whole model under checkpoint names, one tensor at a time, the same for the same seed."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)

    def tensor(*shape: int) -> Any:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0.0, 0.02, generator=generator)

    hidden, heads, kv, head = 2048, 32, 4, 128
    yield "model.embed_tokens.weight", tensor(SHAPE["vocab_size"], hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q_proj", heads * head), ("k_proj", kv * head), ("v_proj", kv * head)):
            yield f"{prefix}.self_attn.{name}.weight", tensor(rows, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", tensor(hidden, heads * head)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            yield f"{prefix}.{name}.weight", 1 + tensor(head)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", 1 + tensor(hidden)
        yield f"{prefix}.mlp.gate.weight", tensor(SHAPE["num_experts"], hidden)
        for expert in range(SHAPE["num_experts"]):
            for name, shape in (("gate_proj", (768, hidden)), ("up_proj", (768, hidden)), ("down_proj", (hidden, 768))):
                yield f"{prefix}.mlp.experts.{expert}.{name}.weight", tensor(*shape)
    yield "model.norm.weight", 1 + tensor(hidden)
    yield "lm_head.weight", tensor(SHAPE["vocab_size"], hidden)


def _refit(llm: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the second of three refits (A, B, A), and whether both A gave the same log-probabilities."""
    import torch

    from quads.integrations.vllm import refit
    from quads.integrations.vllm_plugin.logprobs import teacher_forced

    prompts = [[(7 * i + j) % 1000 + 1000 for j in range(32)] for i in range(8)]
    seen, seconds = [], []
    try:
        for seed in (1, 2, 1):
            weights = list(checkpoint(options.layers, seed))
            torch.cuda.synchronize()
            started = time.perf_counter()
            refit(llm, weights)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            seen.append(torch.cat(teacher_forced(llm, prompts)))
            del weights
    except Exception as error:  # a peer that cannot be refitted is a result, not a failure of the run
        return {"refit_error": f"{type(error).__name__}: {str(error)[:200]}"}
    changed, back = (float((seen[0] - other).abs().max()) for other in seen[1:])
    finite = bool(torch.isfinite(seen[0]).all())
    return {
        "refit_s": round(seconds[1], 3),
        "aba_equal": back == 0.0,
        "aba_max": back,
        "ab_max": changed,
        "finite": finite,
    }


def _weights_gib(llm: Any) -> float:
    def size(model: Any) -> int:
        return sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)

    return llm.apply_model(size)[0] / 2**30


def table(results: dict[str, dict[str, Any]], batches: str) -> str:
    """Tokens/s by arm and batch, then each ratio with its goal."""
    columns = batches.split(",")
    lines = ["", f"{'arm':14}" + "".join(f"{'batch ' + batch:>12}" for batch in columns) + "   weights   refit  A-B-A"]
    for arm, result in results.items():
        speeds = result.get("tokens_per_s", {})
        row = "".join(f"{speeds.get(batch, float('nan')):12.0f}" for batch in columns)
        refit = f"{result.get('refit_s', float('nan')):7.2f} s  {result.get('aba_equal', '-')}"
        lines.append(f"{arm:14}{row}{result.get('weights_gib', float('nan')):8.2f} G {refit}")
    for ours, theirs, goal in GOALS:
        ratios = [_ratio(results, ours, theirs, batch) for batch in columns]
        shown = "".join(f"{ratio:12.3f}" for ratio in ratios)
        met = "met" if all(ratio >= goal for ratio in ratios) else "missed"
        lines.append(f"{ours + ' / ' + theirs:22}{shown}   goal >= {goal} ({met})")
    return "\n".join(lines)


def _ratio(results: dict[str, dict[str, Any]], ours: str, theirs: str, batch: str) -> float:
    speeds = [results.get(arm, {}).get("tokens_per_s", {}).get(batch, float("nan")) for arm in (ours, theirs)]
    return speeds[0] / speeds[1]


if __name__ == "__main__":
    main()
