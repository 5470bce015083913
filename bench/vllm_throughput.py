"""One arm of the throughput comparison: layers of Qwen3-30B-A3B with the same random weights and prompts for all arms.

Arms start side by side, which costs most of the time, and are measured one after the other: `run` says READY and waits
for a line before each pass.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads import recipes
from quads.bench import vllm_engines as engines
from quads.bench.vllm_checkpoint import checkpoint, plain_names, register_loader, shape
from quads.emulation.checkpoints import COMPRESSED_TENSORS
from quads.export import quantization_config

LONGEST = 2048  # prompt and completion together
_MIXED = 128  # requests of the mixed load
_PREFILLED = 32  # prompts of 1024 tokens, one token out


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
    "fp8-triton": Arm(options=_FP8, environment={"VLLM_USE_DEEP_GEMM": "0"}),
    "quads-token-invariant": Arm(
        recipe="quads", changes={"rac_scope": "token"}, environment={"VLLM_BATCH_INVARIANT": "1"}
    ),
}
CASES = tuple(ARMS)
_SIZES = (1, 8, 16, 32, 64, 96, 128, 192, 256)  # batches of CUDA graphs, the same for every arm


def environment(case: str) -> dict[str, str]:
    return ARMS[case].environment


def run(case: str, layers: int, batches: list[int], repeats: int) -> dict[str, Any]:
    """Start, wait, and do what the parent asks for: `measure`, `again`, `refit`, `profile`; anything else ends."""
    started = time.perf_counter()
    llm = _start(ARMS[case], layers, batches)
    result: dict[str, Any] = {"start_s": round(time.perf_counter() - started, 1), "weights_gib": _weights_gib(llm)}
    rates: dict[str, list[float]] = {}
    passes: dict[str, Callable[[], dict[str, Any]]] = {
        "measure": lambda: measured(llm, batches, repeats, rates) | once(llm, rates),
        "again": lambda: measured(llm, batches, repeats, rates),
        "refit": lambda: refitted(llm, ARMS[case], layers),
        "profile": lambda: profiled(llm),
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
    register_loader()
    config: dict[str, Any] = {**shape(), "num_hidden_layers": layers}
    if arm.recipe:
        recipe = recipes.load(arm.recipe).replace(**arm.changes)
        config["quantization_config"] = {"quant_method": "quads", "recipe": recipe.to_dict()}
    if arm.packed:
        ignored = [name for layer in range(layers) for name in plain_names(layer)]
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


def measured(llm: Any, batches: list[int], repeats: int, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Output tokens a second of equal requests of each batch size, input tokens a second of long prompts.

    Medians after one warm-up; `rates` keeps every repeat of every round: what a median of them hides.
    """
    for batch in batches:
        _keep(rates, str(batch), _rates(llm, *_equal(batch), repeats))
    long = [row * 8 for row in _equal(_PREFILLED)[0]]
    _keep(rates, "prompt", [rate * len(long[0]) for rate in _rates(llm, long, [1] * _PREFILLED, repeats)])
    return _medians(rates)


def once(llm: Any, rates: dict[str, list[float]]) -> dict[str, Any]:
    """One mixed load without a warm-up, and how far log-probabilities depend on the batch."""
    _keep(rates, "mixed", _rates(llm, *_mixed(), 1, warm=False))
    dependence = engines.batch_dependence(llm, [row[:64] for row in _equal(16)[0]])
    return {**_medians(rates), "batch": dependence}


def _keep(rates: dict[str, list[float]], load: str, new: list[float]) -> None:
    rates.setdefault(load, []).extend(new)
    _say("SOME", _medians(rates))


def _medians(rates: dict[str, list[float]]) -> dict[str, Any]:
    return {"tokens_per_s": {load: round(statistics.median(each), 1) for load, each in rates.items()}, "rates": rates}


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


def _rates(llm: Any, prompts: list[list[int]], lengths: list[int], repeats: int, *, warm: bool = True) -> list[float]:
    from vllm import SamplingParams

    params = [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, temperature=1.0) for n in lengths]
    requests = [{"prompt_token_ids": row} for row in prompts]
    seconds = []
    for _ in range(repeats + warm):
        started = time.perf_counter()
        llm.generate(requests, params, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    return [round(sum(lengths) / each, 1) for each in seconds[warm:]]


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


def profiled(llm: Any) -> dict[str, Any]:
    """Where prompts and decoding steps of 32 and 128 requests go: microseconds of the GPU, by kernel.

    A decoding step is what 33 output tokens cost beyond one, divided by 32.
    """
    return {"profile": {str(batch): _profile(llm, batch) for batch in (32, 128)}}


def _profile(llm: Any, batch: int) -> dict[str, Any]:
    prompts, steps = _equal(batch)[0], 32
    prompt, _ = _kernels(llm, prompts, 1)
    both, seconds = _kernels(llm, prompts, 1 + steps)
    decode = {name: (us - prompt.get(name, 0.0)) / steps for name, us in both.items()}
    return {
        "seconds": round(seconds, 4),
        "prompt_us": round(sum(prompt.values()), 1),
        "decode_us": round(sum(decode.values()), 1),
        "prompt_kernels": _largest(prompt),
        "decode_kernels": _largest(decode),
    }


def _kernels(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[dict[str, float], float]:
    activity = torch.profiler.ProfilerActivity
    started = time.perf_counter()
    with torch.profiler.profile(activities=[activity.CUDA if torch.cuda.is_available() else activity.CPU]) as profile:
        _rates(llm, prompts, [tokens] * len(prompts), 1, warm=False)
    seconds = time.perf_counter() - started
    times: dict[str, float] = {}
    for row in profile.key_averages():
        times[row.key[:80]] = times.get(row.key[:80], 0.0) + row.self_device_time_total
    return times, seconds


def _largest(times: dict[str, float], count: int = 24) -> dict[str, float]:
    return {name: round(us, 1) for name, us in sorted(times.items(), key=lambda row: -row[1])[:count]}


def _weights_gib(llm: Any) -> float:
    def size(model: Any) -> int:
        return sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)

    return round(llm.apply_model(size)[0] / 2**30, 2)
