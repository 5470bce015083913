"""Stock vLLM, without the plugin, over what `quads export` writes: the same codes, and the log-probabilities of W4A16.

The loader is vLLM's own; an observer reads the parameters after it and before vLLM repacks them for its kernels.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quads import recipes
from quads.bench import vllm_engines as engines
from quads.bench.vllm_smoke import emulated
from quads.emulation.checkpoints import CONVENTIONS, to_multiplier
from quads.export import export_checkpoint
from quads.integrations.vllm_plugin import colocate
from quads.integrations.vllm_plugin.logprobs import teacher_forced
from quads.integrations.vllm_plugin.names import expert_sites, linear_sites
from quads.qdq import PackedWeight
from quads.recipes import Recipe
from quads.sync import export_weights

CASES = ("compressed-tensors", "modelopt", "compressed-tensors-all", "modelopt-all")
_ATTENTION = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def run(case: str) -> dict[str, Any]:
    """Export, load with stock vLLM, compare bytes, compare log-probabilities with the emulated W4A16 policy."""
    os.environ["VLLM_PLUGINS"] = "none"
    recipe = recipes.load("w4a16")
    if case.endswith("-all"):
        recipe = recipe.replace(modules=["proj"])
    model, sequences = engines.tiny(0), engines.tokens(16, 64)
    convention = case.removesuffix("-all")
    with tempfile.TemporaryDirectory() as folder:
        report = export_checkpoint(model, recipe, Path(folder) / "export", convention)
        seen = observe()
        llm = engines.start(Path(folder) / "export", load_format="observed", enforce_eager=True)
    result: dict[str, Any] = {"weights": report.weights, "outer_scales_without_inverse": len(report.inexact)}
    result |= compared(model, recipe, seen, convention)
    result["method"] = llm.apply_model(_methods)[0]
    served = torch.cat(teacher_forced(llm, sequences, together=False))
    result["finite"] = bool(served.isfinite().all())
    result["w4a16"] = engines.spread(served - emulated(model, recipe, sequences))
    result["bf16"] = engines.spread(served - emulated(model, recipes.load("bf16"), sequences))
    drawn = engines.generated(llm, [row[:16] for row in sequences], 32)
    result["sampled_finite"] = all(bool(item["logps"].isfinite().all()) for item in drawn)
    colocate.stop(llm)
    return result


def observe() -> dict[str, Tensor]:
    """Register vLLM's own loader under the format `observed`, with copies of every parameter that it has filled."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    seen: dict[str, Tensor] = {}

    class Observed(DefaultModelLoader):
        def __init__(self, load_config: Any) -> None:
            load_config.load_format = "safetensors"
            super().__init__(load_config)

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            seen.update({name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()})

    register_model_loader("observed")(Observed)
    return seen


def compared(model: nn.Module, recipe: Recipe, seen: dict[str, Tensor], convention: str) -> dict[str, Any]:
    """Bytes of codes and block scales, and outer scales, of every exported weight against what vLLM loaded."""
    style = CONVENTIONS[convention]
    wanted = {packed.name: packed for packed in export_weights(model, recipe)}
    codes = scales = outers = 0
    found: set[str] = set()
    differing: list[str] = []
    for name in [n for n in seen if n.endswith(f"{style.scale}")]:
        layer, prefix = _layer(name.removesuffix(style.scale).rstrip("._"))
        sites = _sites(layer, prefix)
        packed = [wanted[site] for site in sites]
        stem = name.removesuffix(style.scale)
        wants = [_stacked(packed, "packed"), _stacked(packed, "scales")]
        loaded = [seen[stem + style.weight], seen[name].view(torch.uint8)]
        equal = [torch.equal(want, have) for want, have in zip(wants, loaded, strict=True)]
        codes, scales = codes + loaded[0].numel(), scales + loaded[1].numel()
        outers += _outer_equal(packed, seen[stem + style.outer], style.divides)
        found.update(sites)
        differing += [] if all(equal) else [name]
    return {
        "layers_equal": not differing and found == set(wanted),
        "differing": differing,
        "missing": sorted(set(wanted) - found),
        "code_bytes": codes,
        "scale_bytes": scales,
        "outer_scales_equal": outers,
    }


def _layer(stem: str) -> tuple[str, str]:
    """(layer, weight of it): `...routed_experts` and `w13` or `w2`, or a linear layer and ""."""
    parent, _, leaf = stem.rpartition(".")
    return (parent, leaf) if leaf in ("w13", "w2") else (stem, "")


def _sites(layer: str, prefix: str) -> tuple[str, ...]:
    if not prefix:
        return linear_sites(layer, _ATTENTION)
    return (expert_sites(layer)[0 if prefix == "w13" else 1],)


def _stacked(parts: list[PackedWeight], field: str) -> Tensor:
    return torch.cat([getattr(part, field) for part in parts], dim=-2).cpu()


def _outer_equal(parts: list[PackedWeight], stored: Tensor, divides: bool) -> int:
    """How many loaded outer scales give the exported multiplier bit for bit."""
    multiplier = (to_multiplier(stored) if divides else stored.float()).reshape(len(parts[0].outer.reshape(-1)), -1)
    return int((multiplier == parts[0].outer.cpu().reshape(-1, 1)).sum())


def _methods(model: nn.Module) -> dict[str, str]:
    """The class that runs each kind of layer, and its kernel."""
    kinds = {}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        scheme = getattr(module, "scheme", method)
        if method is not None:
            kernel = getattr(scheme, "kernel", None) or getattr(scheme, "nvfp4_backend", None)
            kinds[type(scheme).__name__] = str(kernel if isinstance(kernel, str) else getattr(kernel, "name", kernel))
    return kinds
