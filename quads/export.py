"""Packed NVFP4 checkpoints that stock vLLM loads, in the conventions of compressed-tensors and of ModelOpt.

Both hold the same codes and block scales; they differ in names and in the direction of the outer scale:
ModelOpt stores the multiplier g = amax / 2688, compressed-tensors a divisor, here fl(1 / g). Where fl(1 / fl(1 / g)) is
not g, no divisor inverts to g (quads.emulation.checkpoints): the round trip cannot be byte-equal, and the weight is
listed in `inexact`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from quads.emulation.checkpoints import CONVENTIONS, Convention, read, to_divisor, to_multiplier
from quads.emulation.quantizers import NVFP4Tensor
from quads.qdq import PackedWeight
from quads.recipes import Recipe
from quads.sites import Site, candidates, find_sites
from quads.state import master_state
from quads.sync import export_weights


@dataclass
class ExportReport:
    """What was written: number of packed weights, and those whose outer scale the convention cannot hold exactly."""

    weights: int = 0
    inexact: list[str] = field(default_factory=list)


def export_checkpoint(
    model: nn.Module,
    recipe: Recipe,
    out: Path,
    convention: str,
    *,
    activation_amax: dict[str, float] | None = None,
) -> ExportReport:
    """Write `model` to folder `out`: packed weights where `recipe` selects, all others as they are.

    activation_amax: largest |activation| per selected weight (see quads.calibration), needed for a W4A4 checkpoint
    because stock engines take a static outer scale for activations. ValueError on an unknown convention, a folder in
    use, missing calibration, or a fused layout that the checkpoint format has no names for.
    """
    style = _convention(convention)
    _check_folder(out)
    quantized_activations = recipe.rollout_activations == "nvfp4"
    if quantized_activations and activation_amax is None:
        raise ValueError(f"recipe '{recipe.name}' quantises activations: a stock checkpoint needs their calibration")
    report = ExportReport()
    sites = {site.name: site for site in find_sites(model, recipe)}
    files: dict[str, str] = {}
    out.mkdir(parents=True, exist_ok=True)
    for packed in export_weights(model, recipe):
        amax = activation_amax[packed.name] if quantized_activations and activation_amax else None
        tensors = dict(named_tensors(model, sites[packed.name], packed, style, amax, report))
        _write_shard(out, packed.name, tensors, files)
    _write_shard(out, "unquantized", _others(model, sites), files)
    _write_config(model, recipe, out, style, files)
    return report


def outer_to_stored(outer: Tensor, style: Convention) -> tuple[Tensor, bool]:
    """The stored outer scale, and whether a reader of the convention computes with `outer` bit for bit."""
    if not style.divides:
        return outer, True
    divisor = to_divisor(outer)
    return divisor, torch.equal(to_multiplier(divisor), outer)


def read_weights(folder: Path, convention: str) -> Iterator[tuple[str, NVFP4Tensor]]:
    """Every packed weight of a checkpoint folder under its checkpoint name, streamed."""
    from safetensors import safe_open

    style = _convention(convention)
    index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    for key, file in index.items():
        base, _, leaf = key.rpartition(".")
        if leaf != style.scale:
            continue
        with safe_open(folder / file, "pt") as shard:
            names = (style.weight, style.scale, style.outer)
            yield base, read({name: shard.get_tensor(f"{base}.{name}") for name in names}, style).weight


def _convention(name: str) -> Convention:
    if name not in CONVENTIONS:
        raise ValueError(f"checkpoint convention '{name}' is not one of {', '.join(CONVENTIONS)}")
    return CONVENTIONS[name]


def _check_folder(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: nothing is overwritten")


def named_tensors(
    model: nn.Module,
    site: Site,
    packed: PackedWeight,
    style: Convention,
    amax: float | None = None,
    report: ExportReport | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of one packed weight, its experts and shards apart, in convention `style`."""
    codes = checkpoint_names(model, site, packed.packed)
    scales = checkpoint_names(model, site, packed.scales)
    outers = checkpoint_names(model, site, _outer_per_shard(site, packed))
    report = report or ExportReport()
    for base in codes:
        outer, exact = outer_to_stored(outers[base].reshape(-1)[:1].clone(), style)
        report.weights += 1
        if not exact:
            report.inexact.append(base)
        yield f"{base}.{style.weight}", codes[base].contiguous()
        yield f"{base}.{style.scale}", scales[base].contiguous().view(torch.float8_e4m3fn)
        yield f"{base}.{style.outer}", outer if style.divides else outer.reshape(())
        if amax is not None:
            multiplier = torch.tensor([max(amax, 1e-30) / 2688.0], dtype=torch.float32)
            yield f"{base}.{style.input_outer}", to_divisor(multiplier) if style.divides else multiplier.reshape(())


def _outer_per_shard(site: Site, packed: PackedWeight) -> Tensor:
    """The outer scale in a shape that a checkpoint conversion splits like the weight: [experts, shards, 1]."""
    if packed.outer.ndim == 0:
        return packed.outer.reshape(1, 1)
    shards = 2 if site.attribute == "gate_up_proj" else 1
    return packed.outer.expand(-1, shards, 1).contiguous()


def checkpoint_names(model: nn.Module, site: Site, tensor: Tensor) -> dict[str, Tensor]:
    """`tensor` (K last, like the weight) split under the names of the model's published checkpoints, less `.weight`."""
    from transformers.core_model_loading import revert_weight_conversion

    if tensor.ndim == 2:
        return {site.name: tensor}
    if site.transposed:
        raise ValueError(f"{site.name} stores its experts transposed: no packed checkpoint layout is defined for it")
    split = revert_weight_conversion(model, {site.name: tensor})
    return {name.removesuffix(".weight"): part for name, part in split.items()}


def _others(model: nn.Module, sites: dict[str, Site]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    taken = {name if site.attribute != "weight" else f"{name}.weight" for name, site in sites.items()}
    kept = {name: tensor for name, tensor in master_state(model) if name not in taken}
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        kept = {name: tensor for name, tensor in kept.items() if name not in tied}
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, kept).items()}


def _write_shard(out: Path, name: str, tensors: dict[str, Tensor], files: dict[str, str]) -> None:
    if not tensors:
        return
    file = f"{name}.safetensors"
    save_file(tensors, out / file, metadata={"format": "pt"})
    files.update(dict.fromkeys(tensors, file))


def _write_config(model: Any, recipe: Recipe, out: Path, style: Convention, files: dict[str, str]) -> None:
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}, indent=1))
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    config["quantization_config"] = quantization_config(recipe, _unquantized(model, recipe), style.name)
    config["quads_recipe"] = recipe.to_dict()
    (out / "config.json").write_text(json.dumps(config, indent=2, default=str))
    if style.name == "modelopt":
        quantization = {k: v for k, v in config["quantization_config"].items() if k != "quant_method"}
        document = {"producer": {"name": "modelopt", "version": "quads"}, "quantization": quantization}
        (out / "hf_quant_config.json").write_text(json.dumps(document, indent=2))


def quantization_config(recipe: Recipe, ignored: list[str], convention: str) -> dict[str, Any]:
    """What `config.json` says of a checkpoint under `convention` whose `ignored` matrices stay in full precision."""
    return _QUANTIZATION_CONFIG[_convention(convention).name](recipe, ignored)


def _unquantized(model: nn.Module, recipe: Recipe) -> list[str]:
    """Every matrix that engines would take for a quantised linear layer and is none; an MoE router is one of them."""
    names = {site.name for site in candidates(model)}
    for name, module in model.named_modules():
        matrix = getattr(module, "weight", None)
        if isinstance(matrix, Tensor) and matrix.ndim == 2 and not isinstance(module, nn.Embedding):
            names.add(name.removeprefix("base_model.model.").removesuffix(".base_layer"))
    return sorted(name for name in names if not recipe.selects(name) and ".lora_" not in name)


def _compressed_tensors_config(recipe: Recipe, ignored: list[str]) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    w4a4 = recipe.rollout_activations == "nvfp4"
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "dynamic": False, "scale_dtype": "torch.float8_e4m3fn"},
        "input_activations": {**scheme, "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"} if w4a4 else None,
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


def _modelopt_config(recipe: Recipe, ignored: list[str]) -> dict[str, Any]:
    algorithm = "NVFP4" if recipe.rollout_activations == "nvfp4" else "W4A16_NVFP4"
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ignored,
        "ignore": ignored,
    }


_QUANTIZATION_CONFIG = {"compressed-tensors": _compressed_tensors_config, "modelopt": _modelopt_config}
