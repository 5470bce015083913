"""The numerics that a probe compares: recipes, their references, and two controls that are no recipes.

Each is a context in which the model computes that way, through the one mechanism that trainer and rollout use
themselves: `rollout_numerics` (emulated on CPU, the kernels on CUDA) or `prepare_qat`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quads import recipes
from quads.attribution.inputs import QuantizedRows
from quads.attribution.products import SiteWeights, groups_of, outputs
from quads.attribution.variants import ACTIVATIONS_VARIANT, Place
from quads.compute import Implementation, implementation
from quads.operand import OperandWeight
from quads.qat import prepare_qat, remove_qat
from quads.recipes import Recipe
from quads.rollout import install, restore, rollout_numerics
from quads.sites import Site, find_sites
from quads.suites.config import CONTROLS

ENGINE, ACTIVATIONS = CONTROLS
REFERENCES = ("bf16", "w4", "trainer")
BF16 = recipes.named()["bf16"]
W4A4 = recipes.named()["nvfp4"]


@dataclass(frozen=True)
class Numerics:
    """One way to compute. `recipe` names the quantised weights and the format of each operand.

    kind: `rollout` as `rollout_numerics` computes it; `trainer` as `prepare_qat` does; `activations` Q(X) W^T;
    `engine` the rollout's numerics in another implementation: other attention kernel, experts one after the other.
    """

    kind: str
    recipe: Recipe

    def entered(self, model: nn.Module, seed: int = 0) -> AbstractContextManager[Any]:
        """The context; `seed` is that of the random control's draw."""
        return _KINDS[self.kind](model, self.recipe, seed)

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """The modules that hold quantised weights, of a model outside the context: padding must not reach them."""
        if self.recipe.rollout_weights == "bf16":
            return []
        return list({id(site.module): site.module for site in find_sites(model, self.recipe)}.values())


Pair = tuple[Numerics, Numerics]


def arm(name: str) -> Numerics:
    """The numerics that arm `name` rolls out in: a recipe, or one of CONTROLS (`engine` has its reference's)."""
    if name == ACTIVATIONS:
        return Numerics("activations", W4A4)
    return Numerics("rollout", recipes.load(name))


def comparison(name: str, reference: str) -> Pair | None:
    """(arm, reference) of a record; None where the arm has no such reference.

    bf16: the model as trained. w4: the arm's own Q(W) with unquantised activations, which a QAT trainer computes; only
    for arms with 4-bit weights. trainer: the arm's trainer, whatever its recipe trains in.
    """
    if name == ENGINE:
        recipe = {"bf16": BF16, "w4": _weights_only(W4A4)}.get(reference)
        return None if recipe is None else (Numerics("engine", recipe), Numerics("rollout", recipe))
    ours = arm(name)
    if reference == "bf16":
        return ours, Numerics("rollout", BF16)
    if ours.kind != "rollout":
        return None
    if reference == "trainer":
        trained = ours.recipe.train_weights != "bf16"
        return ours, Numerics("trainer", ours.recipe) if trained else Numerics("rollout", BF16)
    return (ours, Numerics("rollout", _weights_only(ours.recipe))) if ours.recipe.rollout_weights == "nvfp4" else None


def in_layer(numerics: Numerics, layer: int) -> Numerics:
    """`numerics` in one decoder layer, BF16 in all others."""
    elsewhere = rf"(^|\.)layers\.(?!{layer}\.)"
    return Numerics(numerics.kind, numerics.recipe.replace(exclude=[*numerics.recipe.exclude, elsewhere]))


def layers(model: nn.Module) -> list[int]:
    """Decoder layers with quantised weights."""
    return sorted({Place(site.name).layer for site in find_sites(model, W4A4)})


def _weights_only(recipe: Recipe) -> Recipe:
    """Q(W) of `recipe` and nothing else; equal for recipes that quantise the same weights alike."""
    kept = {key: getattr(recipe, key) for key in ("weight_block", "block_rule", "modules", "exclude")}
    return recipes.named()["w4a16"].replace(**{k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()})


@contextmanager
def _engine(model: nn.Module, recipe: Recipe, seed: int) -> Iterator[None]:
    attention = "sdpa" if model.config._attn_implementation == "eager" else "eager"  # type: ignore[union-attr]
    with rollout_numerics(model, recipe, seed=seed), implementation(model, Implementation(attention, "eager")):
        yield


@contextmanager
def _trainer(model: nn.Module, recipe: Recipe, seed: int) -> Iterator[None]:
    prepare_qat(model, recipe)
    try:
        yield
    finally:
        remove_qat(model)


@contextmanager
def _activations(model: nn.Module, recipe: Recipe, seed: int) -> Iterator[None]:
    saved = []
    try:
        for index, site in enumerate(find_sites(model, recipe)):
            product = _ActivationProduct(site, recipe, index)
            operand = OperandWeight.wrap(site.parameter.detach(), product, k_last=not site.transposed)
            saved.append((site, install(site, operand)))
        with implementation(model, Implementation(experts="grouped_mm")):
            yield
    finally:
        while saved:
            restore(*saved.pop())


class _ActivationProduct:
    """Q(X) W^T, as `quads.attribution` computes it."""

    def __init__(self, site: Site, recipe: Recipe, index: int) -> None:
        self.weights, self.granularity = SiteWeights(site, recipe, index), recipe.activation_outer

    def expert(self, index: int) -> _ActivationProduct:
        raise NotImplementedError(f"{self.weights.place.name}: experts must run as one grouped product")

    def matmul(self, x: Tensor) -> Tensor:
        return self.grouped_matmul(x, torch.tensor([x.shape[0]], dtype=torch.int32))

    def grouped_matmul(self, x: Tensor, ends: Tensor) -> Tensor:
        rows = QuantizedRows(x, self.granularity, self.weights.place.name, self.weights.index)
        return outputs(ACTIVATIONS_VARIANT, x, groups_of(ends), self.weights, rows)


_KINDS: dict[str, Callable[[nn.Module, Recipe, int], AbstractContextManager[Any]]] = {
    "rollout": lambda model, recipe, seed: rollout_numerics(model, recipe, seed=seed),
    "trainer": _trainer,
    "activations": _activations,
    "engine": _engine,
}
