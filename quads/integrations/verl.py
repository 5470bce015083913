"""QUADS in the FSDP2 workers of verl 0.9: named as the model's external library, with the recipe beside it.

    actor_rollout_ref.model.external_lib=quads.integrations.verl
    +actor_rollout_ref.model.override_config.quads_recipe=quads        # a name, or a recipe .toml that workers can read

verl imports the external library in every worker before it builds its engine. The import registers `QuadsFSDPEngine`
in verl's engine registry for NVIDIA GPUs, where it goes before verl's own; no verl file is changed. The rollout's half
is the vLLM plugin. `quads suite render NAME --verl` writes both; docs/verl.md says what was tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from quads import recipes
from quads.errors import CannotRunHereError
from quads.integrations.workers import prepare_actor
from quads.recipes import Recipe
from quads.state import master_name

try:
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
except ImportError as error:
    raise CannotRunHereError(f"quads.integrations.verl needs verl 0.9 in this environment: {error}") from error

RECIPE_KEY = "quads_recipe"


class QuadsFSDPEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 engine whose forward sees Q(W), and whose weight sync sends the masters.

    Under FSDP2 the trainer quantises the gathered parameter in the precision that FSDP computes in (bfloat16); vLLM
    rounds what it receives to its own dtype before it quantises. With both in bfloat16 the two hold the same bytes.
    """

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        self.recipe = recipe_of(model_config)
        check(self.recipe, model_config, engine_config)
        super().__init__(model_config, engine_config, *args, **kwargs)

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        """Prepare QAT where the model is still whole; a frozen reference policy stays as it is."""
        if not self.engine_config.forward_only:
            prepare_actor(module, self.recipe)
        return super()._build_fsdp_module(module)

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
        """(generator of (checkpoint name, master weight), None): what verl sends to the rollout."""
        with ordinary_names(self.module):
            return super().get_per_tensor_param(*args, **kwargs)


def register() -> None:
    """Put `QuadsFSDPEngine` before verl's own FSDP2 engine on NVIDIA GPUs; harmless when called again."""
    if ("cuda", "nvidia") not in EngineRegistry._engines.get("language_model", {}).get("fsdp2", {}):
        EngineRegistry.register("language_model", "fsdp2", device="cuda", vendor="nvidia")(QuadsFSDPEngine)


def recipe_of(model_config: Any) -> Recipe:
    """The recipe that the job names; ValueError where it names none."""
    name = (model_config.override_config or {}).get(RECIPE_KEY)
    if not name:
        raise ValueError(f"actor_rollout_ref.model.override_config lacks {RECIPE_KEY}: name a recipe or a .toml file")
    return recipes.load(name)


def check(recipe: Recipe, model_config: Any, engine_config: Any) -> None:
    """ValueError for a worker configuration under which the trainer would not compute with Q(W) of the masters."""
    if recipe.train_weights == "bf16":
        return
    wrong = {
        f"actor.strategy is '{engine_config.strategy}': quads trains under fsdp2": engine_config.strategy != "fsdp2",
        "model.lora_rank is set: verl would send adapters that Q(W) has not seen": model_config.lora_rank > 0,
        "actor.fsdp_config.qat.enable is set: verl's own QAT would quantise twice": engine_config.qat.enable,
    }
    for why, holds in wrong.items():
        if holds:
            raise ValueError(f"actor_rollout_ref.{why}")


@contextmanager
def ordinary_names(module: nn.Module) -> Iterator[None]:
    """Inside, `module.state_dict()` has the names that it has without QAT, so that verl finds its experts to unfuse."""

    def rename(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        named = [(master_name(name), tensor) for name, tensor in state.items()]
        state.clear()
        state.update(named)

    handle = module.register_state_dict_post_hook(rename)
    try:
        yield
    finally:
        handle.remove()


register()
