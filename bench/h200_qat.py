"""What QUADS costs a trainer on a GPU: the overhead of QAT in a training step, and the refit bandwidth.

    python bench/h200_qat.py --out OUT        # about a minute on an H200

Step: a Qwen3-MoE of about one billion parameters, BF16, fused AdamW, forward + backward + update, plain and prepared
steps alternating on two copies; the overhead is the median of the pairwise ratios.
Refit: quantise, pack and hand over one 30B-A3B-shaped layer (128 experts) at a time; bytes counted: each BF16 weight
read once, codes and scales written once. The copy bandwidth is measured in the same run.
Exactness first: bytes packed on the GPU equal those of the CPU emulator, and a prepared model's weights are in sync.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from quads import qdq, recipes
from quads.qat import prepare_qat
from quads.sync import export_weights, verify_sync

QUADS = recipes.named()["quads"]
MODEL = {
    **{"vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "head_dim": 64},
    **{"num_key_value_heads": 4, "intermediate_size": 2048, "num_experts": 32, "num_experts_per_tok": 4},
    **{"moe_intermediate_size": 704, "tie_word_embeddings": False, "max_position_embeddings": 4096},
}
LAYER = {"gate_up_proj": (128, 1536, 2048), "down_proj": (128, 2048, 768)}  # Qwen3-30B-A3B


def milliseconds(work: Any) -> float:
    """Time of `work()` on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def copy_bandwidth(gib: int = 4, repeats: int = 10) -> float:
    """Bytes read plus written a second of a device-to-device copy."""
    source = torch.randint(0, 255, (gib << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [milliseconds(lambda: target.copy_(source)) for _ in range(repeats)]
    return 2 * source.numel() / (statistics.median(times) * 1e-3)


class Expert(nn.Module):
    """One layer's expert tensors, so that recipes find them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator("cuda").manual_seed(seed)
        for name, shape in LAYER.items():
            weight = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) * 0.02
            self.register_parameter(name, nn.Parameter(weight))


def layer_set(layers: int) -> nn.Module:
    """`layers` expert layers under names that the default recipe selects."""
    return nn.ModuleDict({str(i): nn.ModuleDict({"experts": Expert(i)}) for i in range(layers)})


def check_bytes() -> None:
    """GPU and CPU pack the same bytes."""
    torch.manual_seed(0)
    for shape in ((48, 160), (3, 32, 64), (4, 704, 1024), (2, 256, 2048)):
        for exponent in (-30, 0, 20):
            weight = (torch.randn(shape) * 2.0**exponent).bfloat16()
            outer = (weight.float().abs().amax(dim=(-2, -1), keepdim=weight.ndim > 2) / 2688.0).float()
            cpu = qdq.pack(weight, QUADS, outer)
            gpu = qdq.pack(weight.cuda(), QUADS, outer.cuda())
            assert torch.equal(cpu.packed, gpu.packed.cpu()) and torch.equal(cpu.scales, gpu.scales.cpu()), shape
            fake_cpu = qdq.fake_quantize(weight, QUADS, outer)
            fake_gpu = qdq.fake_quantize(weight.cuda(), QUADS, outer.cuda()).cpu()
            assert torch.equal(fake_cpu.view(torch.int16), fake_gpu.view(torch.int16)), shape


def step_overhead(tokens: int, pairs: int) -> dict[str, Any]:
    """Milliseconds of plain and prepared training steps, in pairs."""
    models = []
    for prepared in (False, True):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**MODEL), dtype=torch.bfloat16).train()
        if prepared:
            prepare_qat(model, QUADS)
            verify_sync(model, QUADS, export_weights(model, QUADS))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        models.append((model, optimizer))
    ids = torch.randint(0, MODEL["vocab_size"], (tokens // 1024, 1024), device="cuda")

    def step(index: int) -> None:
        model, optimizer = models[index]
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    for index in (0, 1) * 5:
        step(index)
    times = [[milliseconds(lambda i=i: step(i)) for i in order] for order in ((0, 1), (1, 0)) * (pairs // 2)]
    plain = [pair[0] if n % 2 == 0 else pair[1] for n, pair in enumerate(times)]
    qat = [pair[1] if n % 2 == 0 else pair[0] for n, pair in enumerate(times)]
    ratios = sorted(b / a for a, b in zip(plain, qat, strict=True))
    return {
        "parameters": models[0][0].num_parameters(),
        "tokens": tokens,
        "plain_ms": statistics.median(plain),
        "qat_ms": statistics.median(qat),
        "ratio_median": statistics.median(ratios),
        "ratio_p20_p80": [ratios[len(ratios) // 5], ratios[-1 - len(ratios) // 5]],
        "pairs": len(ratios),
    }


def refit(layers: int, repeats: int, copy: float) -> dict[str, Any]:
    """Seconds and bandwidth of exporting `layers` layers into storage that a rollout already holds."""
    model = layer_set(layers)
    held = {w.name: w for w in export_weights(model, QUADS)}
    elements = sum(p.numel() for p in model.parameters())
    moved = elements * (2 + 0.5 + 1 / 16)

    def hand_over() -> None:
        for _ in export_weights(model, QUADS, into=held):
            pass

    hand_over()
    times = [milliseconds(hand_over) for _ in range(repeats)]
    bandwidth = moved / (statistics.median(times) * 1e-3)
    peak = torch.cuda.max_memory_allocated()
    return {
        "layers": layers,
        "elements": elements,
        "ms": statistics.median(times),
        "bytes_per_s": bandwidth,
        "share_of_copy": bandwidth / copy,
        "peak_bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--pairs", type=int, default=40)
    options = parser.parse_args()
    check_bytes()
    copy = copy_bandwidth()
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_bytes_per_s": copy,
        "refit": refit(layers=8, repeats=10, copy=copy),
    }
    torch.cuda.empty_cache()
    result["step"] = [step_overhead(tokens, options.pairs) for tokens in (options.tokens, 2 * options.tokens)]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "qat.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
