"""`quantization="quads"`: which method each layer of a vLLM model gets.

The recipe comes from the checkpoint's `quantization_config` or from `hf_overrides`:
    {"quant_method": "quads", "recipe": "nvfp4"}              a named recipe
    {"quant_method": "quads", "recipe": "path/to/own.toml"}   a recipe file
    {"quant_method": "quads", "recipe": {"rollout_weights": "nvfp4", ...}}, or "recipe" a name and "set" changes to it
and is `quads` where nothing says otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from quads import recipes
from quads.integrations.vllm_plugin import names
from quads.recipes import Recipe, RecipeError

_FIELDS = ("quant_method", "recipe", "set", "seed")


class QuadsConfig(QuantizationConfig):
    """One recipe for one model; `seed` draws the blocks of the random-RAC control."""

    def __init__(self, recipe: Recipe | None = None, seed: int = 0) -> None:
        super().__init__()
        self.recipe = recipe or recipes.load("quads")
        self.seed = seed
        self._selected = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuadsConfig:
        """RecipeError names an unknown field or a recipe that cannot be."""
        for key in config:
            if key not in _FIELDS:
                raise RecipeError(f"quantization_config field '{key}' is unknown; known fields: {', '.join(_FIELDS)}")
        given = config.get("recipe", "quads")
        recipe = recipes.from_dict(given) if isinstance(given, dict) else recipes.load(given)
        changes, seed = config.get("set") or {}, config.get("seed", 0)
        for name, value, kind, word in (("set", changes, dict, "a table"), ("seed", seed, int, "an integer")):
            if not isinstance(value, kind):
                raise RecipeError(f"quantization_config field '{name}' is {value!r}, not {word}")
        return cls(recipe.replace(**changes) if changes else recipe, seed)

    @classmethod
    def get_name(cls) -> str:  # type: ignore[override]
        return "quads"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def maybe_update_config(self, model_name: str, hf_config: Any = None, **_: Any) -> None:
        names.check_tied(self.recipe, bool(getattr(hf_config, "tie_word_embeddings", False)))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The recipe's method where it selects the layer; else full precision that survives any number of refits."""
        from quads.integrations.vllm_plugin import linear, moe

        if isinstance(layer, RoutedExperts):
            sites = names.expert_sites(prefix)
            if not names.selected(self.recipe, sites, prefix):
                return moe.PlainMoEMethod(layer.moe_config, prefix) if current_platform.is_cpu() else None
            self._selected = True
            return moe.QuadsMoEMethod(layer.moe_config, self.recipe, prefix, self._seeds(len(sites)))
        if not isinstance(layer, (LinearBase, ParallelLMHead)):
            return None
        parts = names.linear_sites(prefix, self.packed_modules_mapping)
        if names.selected(self.recipe, parts, prefix):
            self._selected = True
            return linear.QuadsLinearMethod(self.recipe, prefix, parts, self._seeds(len(parts)))
        if current_platform.is_cpu():
            return linear.PlainLinearMethod(self._check_selected)
        return linear.StockLinearMethod(self._check_selected) if isinstance(layer, LinearBase) else None

    def _check_selected(self) -> None:
        """RecipeError where the built model has no layer under a quantising recipe; a pipeline stage may have none."""
        if not self._selected and self.recipe.rollout_weights != "bf16" and get_pp_group().world_size == 1:
            raise RecipeError(
                f"recipe field 'modules' {list(self.recipe.modules)} selects no layer of this model: it would be served"
                ' in full precision (a dense model: "set": {"modules": ["proj"]})'
            )

    def _seeds(self, count: int) -> int:
        """The first of `count` seeds: one a weight in model order, as `quads.rollout` counts them."""
        first, self.seed = self.seed, self.seed + count
        return first
