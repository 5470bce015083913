"""Which numerics a diagnosis tries: each variant is one way to compute the selected layers.

`reference` is the model as trained. `weights` sees Q(W), what a QAT trainer sees; `activations` sees Q(X); `both` is
W4A4; `rac-*`, `token-*` and `random-*` are W4A4 with residual compensation; `engine` is no quantisation at all but
another implementation of the same BF16 arithmetic (other summation order, other attention kernel).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

from quads.recipes import Recipe, RecipeError

REFERENCE, WEIGHTS, ACTIVATIONS, BOTH, ENGINE = "reference", "weights", "activations", "both", "engine"
SCOPES = {"batch": "rac", "token": "token", "random": "random"}  # rac_scope -> prefix of the variant's name

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Numerics of the selected layers, and where they hold.

    ratio: share of the 16-channel blocks whose residual is compensated; scope, seed: as in a recipe.
    layers, projections: only in these decoder layers (None: all) and these leaf names, elsewhere as the reference.
    """

    name: str
    weights: bool = False
    activations: bool = False
    ratio: float = 0.0
    scope: str = "batch"
    seed: int = 0
    engine: bool = False
    layers: frozenset[int] | None = None
    projections: frozenset[str] | None = None

    def touches(self, place: Place) -> bool:
        """Whether this variant computes the weight at `place` in other numerics than the reference."""
        if not (self.weights or self.activations or self.engine):
            return False
        here = self.layers is None or place.layer in self.layers
        return here and (self.projections is None or place.projection in self.projections)


@dataclass(frozen=True)
class Place:
    """Where a weight sits: its dotted name, decoder layer (int) and leaf name such as `q_proj`."""

    name: str

    @cached_property
    def layer(self) -> int:
        found = _LAYER.search(f".{self.name}")
        return int(found.group(1)) if found else -1

    @cached_property
    def projection(self) -> str:
        return self.name.rpartition(".")[2]


REFERENCE_VARIANT = Variant(name=REFERENCE)
WEIGHTS_VARIANT = Variant(name=WEIGHTS, weights=True)
ACTIVATIONS_VARIANT = Variant(name=ACTIVATIONS, activations=True)
BOTH_VARIANT = Variant(name=BOTH, weights=True, activations=True)
ENGINE_VARIANT = Variant(name=ENGINE, engine=True)
TERMS = (WEIGHTS_VARIANT, ACTIVATIONS_VARIANT, BOTH_VARIANT, ENGINE_VARIANT)


def ladder(ratios: tuple[float, ...], scopes: tuple[str, ...], seeds: tuple[int, ...]) -> list[Variant]:
    """W4A4 + RAC at every ratio: one ladder a scope, one a seed for `random`. At 100 % all scopes are the same."""
    rungs = []
    for scope in scopes:
        for seed in seeds if scope == "random" else (0,):
            for ratio in sorted(ratios):
                if ratio < 1.0 or scope == "batch":
                    rungs.append(_rung(scope, ratio, seed))
    return rungs


def _rung(scope: str, ratio: float, seed: int) -> Variant:
    suffix = f"-s{seed}" if scope == "random" else ""
    return replace(BOTH_VARIANT, name=f"{SCOPES[scope]}-{100 * ratio:g}{suffix}", ratio=ratio, scope=scope, seed=seed)


def rollout_variant(recipe: Recipe) -> Variant:
    """The variant that computes what a rollout under `recipe` computes; RecipeError where none is emulated here."""
    if recipe.rollout_weights == "fp8" or recipe.rac_scope not in (*SCOPES, "all"):
        what = "rollout_weights 'fp8'" if recipe.rollout_weights == "fp8" else f"rac_scope '{recipe.rac_scope}'"
        raise RecipeError(f"attribution emulates NVFP4 with rac_scope {', '.join(SCOPES)} or all, not {what}")
    if recipe.rollout_activations == "bf16":
        return REFERENCE_VARIANT if recipe.rollout_weights == "bf16" else WEIGHTS_VARIANT
    if not recipe.rac_ratio:
        return BOTH_VARIANT
    return _rung("batch" if recipe.rac_ratio == 1.0 else recipe.rac_scope, recipe.rac_ratio, 0)


def only_layer(variant: Variant, layer: int) -> Variant:
    """`variant` in one decoder layer, the reference in all others."""
    return replace(variant, name=f"{variant.name}@layer-{layer}", layers=frozenset([layer]))


def only_projection(variant: Variant, projection: str) -> Variant:
    """`variant` in one kind of projection, the reference in all others."""
    return replace(variant, name=f"{variant.name}@{projection}", projections=frozenset([projection]))


def without_layers(variant: Variant, kept: frozenset[int], layers: frozenset[int]) -> Variant:
    """`variant` in all `layers` but the `kept`, which stay in the reference's numerics."""
    return replace(variant, name=f"{variant.name}-keep-{len(kept)}", layers=layers - kept)
