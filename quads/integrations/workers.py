"""Three lines for the training workers of verl, NeMo-RL and other FSDP trainers. Nothing of theirs is imported.

    prepare_actor(module, "quads")                    # before FSDP wraps it
    for name, tensor in packed_for_rollout(module, "quads"): ...    # weight sync: what an engine loads
    weights_for_rollout(module)                       # or: BF16 masters, quantised again by the engine's quads plugin
Both forms give the rollout identical bytes: `quads.sync.verify_sync` proves it for a running pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from quads.emulation.checkpoints import CONVENTIONS
from quads.export import named_tensors
from quads.qat import prepare_qat
from quads.qdq import whole
from quads.recipes import Recipe, load
from quads.sites import find_sites
from quads.state import master_state
from quads.sync import export_weights


def prepare_actor(module: nn.Module, recipe: str | Path | Recipe) -> list[str]:
    """Prepare a worker's actor for QAT in place, before it is sharded; returns the quantised weights' names."""
    return prepare_qat(module, _recipe(recipe))


def weights_for_rollout(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, master weight) under checkpoint names of the module tree, each gathered from its shards when asked for."""
    for name, tensor in master_state(module):
        yield name, whole(tensor)


def packed_for_rollout(
    module: nn.Module, recipe: str | Path | Recipe, convention: str = "modelopt"
) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor): packed codes, block scales and outer scales of the selected weights, then the rest."""
    chosen = _recipe(recipe)
    sites: dict[str, Any] = {site.name: site for site in find_sites(module, chosen)}
    for packed in export_weights(module, chosen):
        yield from named_tensors(module, sites[packed.name], packed, CONVENTIONS[convention])
    taken = {name if site.attribute != "weight" else f"{name}.weight" for name, site in sites.items()}
    yield from ((name, tensor) for name, tensor in weights_for_rollout(module) if name not in taken)


def _recipe(recipe: str | Path | Recipe) -> Recipe:
    return recipe if isinstance(recipe, Recipe) else load(recipe)
