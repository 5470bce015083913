"""From the names of vLLM's layers to the names that recipes, trainers and checkpoints use.

vLLM fuses q/k/v and gate/up into one layer. A recipe names the parts; a fused layer is quantised when all of its
parts are, with one outer scale (the rule of `quads.sites`), and refused when only some are.
"""

from __future__ import annotations

from quads.emulation.quantizers import BLOCK
from quads.recipes import Recipe, RecipeError
from quads.sites import FUSED_BY_ENGINES, is_router

EXPERT_SITES = ("gate_up_proj", "down_proj")
# Modules that transformers calls otherwise than vLLM and the checkpoints do.
_RENAMED = {".block_sparse_moe.": ".mlp."}
# Fused names that a model class may leave out of its own packed_modules_mapping.
_FUSED = {"qkv_proj": list(FUSED_BY_ENGINES[0]), "gate_up_proj": list(FUSED_BY_ENGINES[1])}


def linear_sites(prefix: str, fused: dict[str, list[str]]) -> tuple[str, ...]:
    """Names of the linear layers that vLLM's layer `prefix` holds, in the order of their rows."""
    parent, _, leaf = _trainers_name(prefix).rpartition(".")
    parts = (fused or {}).get(leaf) or _FUSED.get(leaf) or [leaf]
    return tuple(f"{parent}.{part}" if parent else part for part in parts)


def expert_sites(layer_name: str) -> tuple[str, str]:
    """Names of the two fused expert tensors of the MoE layer `layer_name`."""
    base = _trainers_name(layer_name).removesuffix(".routed_experts")
    return f"{base}.{EXPERT_SITES[0]}", f"{base}.{EXPERT_SITES[1]}"


def _trainers_name(prefix: str) -> str:
    for engine, trainer in _RENAMED.items():
        prefix = prefix.replace(engine, trainer)
    return prefix


def selected(recipe: Recipe, sites: tuple[str, ...], layer: str) -> bool:
    """Whether `recipe` quantises every one of `sites`; RecipeError where it would quantise a part of `layer`."""
    chosen = [site for site in sites if recipe.selects(site) and not is_router(site)]
    if recipe.rollout_weights == "bf16" or not chosen:
        return False
    if len(chosen) < len(sites):
        left = next(site for site in sites if site not in chosen)
        fused = f"vLLM fuses both into {layer}, select all or none"
        raise RecipeError(f"recipe field 'modules' selects {chosen[0]} but not {left}: {fused}")
    return True


def check_k(layer: str, k: int, partitions: str = "") -> None:
    """RecipeError where K of this rank's shard is not whole 16-blocks."""
    if k % BLOCK:
        raise RecipeError(f"recipe selects {layer}, whose K = {k}{partitions} is not a multiple of {BLOCK}")


def check_not_absorbed(layer: str) -> None:
    """RecipeError for the projection that MLA multiplies into queries and outputs: vLLM reads its plain weight."""
    if layer.endswith("kv_b_proj"):
        raise RecipeError(f"recipe selects {layer}, which vLLM's MLA multiplies by inside attention: exclude it")


def check_tied(recipe: Recipe, tied: bool) -> None:
    """RecipeError where the recipe would quantise an output head that is the input embedding."""
    if tied and recipe.rollout_weights != "bf16" and recipe.selects("lm_head"):
        raise RecipeError("recipe selects lm_head, which is tied to the input embeddings: exclude it")
