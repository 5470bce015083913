"""vLLM beside a trainer in one process: the folder that the engine starts from, and what it is refitted with.

TRL's colocated engine takes no quantisation of ours: it reads the model folder. `engine_folder` writes one whose
config names the recipe; the trainer keeps its own model.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from quads.integrations.vllm import engine_weights, refit
from quads.qdq import PackedWeight
from quads.recipes import Recipe
from quads.sites import candidates
from quads.state import master_state
from quads.sync import export_weights, verify_sync

_TAKE_FUSED_EXPERTS = ("qwen2_moe", "qwen3_moe", "olmoe")  # vLLM's loaders of these need no expert by itself


def engine_folder(model: Any, recipe: Recipe, out: Path, *, tokenizer: Any = None, seed: int = 0) -> Path:
    """Write `model` (and `tokenizer`) to `out` with a config that serves it under `recipe`."""
    model.save_pretrained(out, state_dict=dict(master_state(model)))
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    config = json.loads((out / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "quads", "recipe": recipe.to_dict(), "seed": seed}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    return out


def trainer_update(model: nn.Module, recipe: Recipe) -> Iterator[tuple[str, Tensor] | PackedWeight]:
    """Every weight of a trainer's model for `refit`: packed where `recipe` has NVFP4 weights, adapters merged.

    The rest comes under the checkpoint's names. Works on a model under `prepare_qat` (the master weights are sent) and
    inside a peft wrapper.
    """
    packs = recipe.rollout_weights == "nvfp4"
    full = dict(_full_precision(model, recipe if packs else None))
    yield from _as_checkpoint(model, full).items()
    if packs:
        yield from export_weights(model, recipe)


def _full_precision(model: nn.Module, packed: Recipe | None) -> Iterator[tuple[str, Tensor]]:
    """Every weight that `packed` does not select, under transformers' names."""
    sent = set()
    for site in candidates(model):
        sent.add(id(site.parameter))
        if packed is None or not packed.selects(site.name):
            name = f"{site.name}.weight" if site.attribute == "weight" else site.name
            yield name, site.merge(site.parameter).detach()
    for name, parameter in model.named_parameters():
        if id(parameter) not in sent and ".lora_" not in name:
            yield name.removeprefix("base_model.model.").replace(".base_layer", ""), parameter.detach()


def _as_checkpoint(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """`weights` as `save_pretrained` would write them, for vLLM's loaders: other names, experts one by one (views)."""
    if model.config.model_type in _TAKE_FUSED_EXPERTS:
        return weights
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    return revert_weight_conversion(whole, weights)


def sync(llm: Any, model: nn.Module, recipe: Recipe, *, verify: bool = True) -> int:
    """Refit `llm` from `model`; returns how many weights were then proven equal bit for bit, or SyncError."""
    refit(llm, trainer_update(model, recipe))
    if not verify or recipe.rollout_weights != "nvfp4":
        return 0
    return verify_sync(model, recipe, engine_weights(llm))


def stop(llm: Any) -> None:
    """Free an engine of this process, so that the next one can start."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def use_in_trl(trainer: Any, recipe: Recipe, *, verify: bool = True) -> Callable[[], None]:
    """Make a TRL GRPOTrainer with a colocated vLLM sync through `sync`; returns what it now calls before a rollout."""
    generation = trainer.vllm_generation
    model = trainer.accelerator.unwrap_model(trainer.model)

    def sync_weights() -> None:
        sync(generation.llm, model, recipe, verify=verify)

    generation.sync_weights = sync_weights
    return sync_weights
