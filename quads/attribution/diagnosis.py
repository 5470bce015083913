"""The diagnosis of a model: every variant through it once, and the tables that come out.

Two passes. The first takes all variants, each term in one decoder layer alone and in one kind of projection alone, and
the layers' own errors. It ranks the layers; the second measures what keeping the worst of them in BF16 buys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from quads.attribution import batch as batches
from quads.attribution import tables
from quads.attribution.advice import advise
from quads.attribution.batch import TokenBatch
from quads.attribution.errors import LocalErrors
from quads.attribution.layerwise import LayerScope, LayerwiseRun, resident
from quads.attribution.result import Diagnosis
from quads.attribution.variants import (
    ACTIVATIONS_VARIANT,
    BOTH_VARIANT,
    REFERENCE_VARIANT,
    TERMS,
    WEIGHTS_VARIANT,
    Place,
    Variant,
    ladder,
    only_layer,
    only_projection,
    rollout_variant,
    without_layers,
)
from quads.recipes import ROUTED_EXPERTS, Recipe, named
from quads.sites import candidates, find_sites

RATIOS = (0.125, 0.25, 0.5, 0.75, 1.0)
DECODER_LINEARS = (r"(^|\.)layers\.\d+\.",)
_ISOLATED = (WEIGHTS_VARIANT, ACTIVATIONS_VARIANT, BOTH_VARIANT)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a diagnosis tries.

    ratios: of RAC, in (0, 1]; scopes: who shares a selection; seeds: draws of the random control.
    isolate: also each layer and each projection alone; keep: how many of the worst layers stay in BF16 for a trial.
    """

    ratios: tuple[float, ...] = RATIOS
    scopes: tuple[str, ...] = ("batch", "random", "token")
    seeds: tuple[int, ...] = (0, 1)
    isolate: bool = True
    keep: tuple[int, ...] = (1, 3, 6)

    def __post_init__(self) -> None:
        for ratio in self.ratios:
            if not 0.0 < ratio <= 1.0:
                raise ValueError(f"ratios holds {ratio}: a RAC ratio is above 0 and at most 1")
        if not self.seeds:
            raise ValueError("seeds is empty: the random control needs at least one draw")

    def everywhere(self, rollout: Variant = BOTH_VARIANT) -> list[Variant]:
        """Variants that hold in every selected layer, that of the recipe's `rollout` among them."""
        tried = [*TERMS, *ladder(self.ratios, self.scopes, self.seeds)]
        return tried if rollout in (*tried, REFERENCE_VARIANT) else [*tried, rollout]

    def alone(self, places: list[Place]) -> list[Variant]:
        """Each term in one decoder layer only, and in one kind of projection only."""
        if not self.isolate:
            return []
        layers = sorted({place.layer for place in places})
        projections = dict.fromkeys(place.projection for place in places)
        by_layer = [only_layer(variant, layer) for variant in _ISOLATED for layer in layers]
        return by_layer + [only_projection(variant, name) for variant in _ISOLATED for name in projections]


def diagnose(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    plan: Plan | None = None,
    recipe: Recipe | None = None,
    max_tokens: int = 48,
    scope: LayerScope = resident,
) -> Diagnosis:
    """Diagnose `model` on the first `max_tokens` tokens of every prompt; see `diagnose_tokens`."""
    return diagnose_tokens(model, batches.encode(tokenizer, prompts, max_tokens), plan=plan, recipe=recipe, scope=scope)


def diagnose_tokens(
    model: nn.Module,
    batch: TokenBatch,
    *,
    plan: Plan | None = None,
    recipe: Recipe | None = None,
    scope: LayerScope = resident,
    temperature: float = 1.0,
) -> Diagnosis:
    """Split the gap of `model` on `batch` into weight, activation and engine terms; the model is left as it was.

    `recipe` names the selected weights (default: routed experts of a MoE, all decoder linears of a dense model), the
    block rule and the activations' outer scale; where the batch carries recorded log-probabilities its rollout
    numerics are also what they are compared with. RecipeError or ValueError names a weight or activation that cannot
    be quantised.
    """
    plan, recipe = plan or Plan(), recipe or default_recipe(model)
    rollout = rollout_variant(recipe)
    batches.check_vocabulary(batch, model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    sites = find_sites(model, recipe)
    places = [Place(site.name) for site in sites]
    everywhere = plan.everywhere(rollout)
    local = LocalErrors(everywhere, (batch.tokens.shape[0], batch.tokens.shape[1]))
    start = partial(LayerwiseRun, model, sites, recipe, scope=scope, temperature=temperature)
    logps = start(everywhere + plan.alone(places), observe=local.observe)(batch.tokens, batch.real)
    result = Diagnosis(
        tokens=batch.count, prompts=len(batch.tokens), layers=len({p.layer for p in places}), weights=len(sites)
    )
    tables.add_gaps(result, everywhere, logps, batch)
    tables.add_terms(result, rollout.name, logps, batch)
    tables.add_errors(result, local)
    if plan.isolate:
        tables.add_isolated(result, plan.alone(places), logps, batch)
        kept = _keep_worst(result, plan, places)
        tables.add_kept(result, kept, start(kept)(batch.tokens, batch.real), batch)
    result.advice = advise(result)
    return result


def _keep_worst(result: Diagnosis, plan: Plan, places: list[Place]) -> list[Variant]:
    """W4A4 with the worst layers in BF16, for every number of layers that leaves some quantised."""
    worst = [row["layer"] for row in result.ranking()]
    layers = frozenset(place.layer for place in places)
    counts = [count for count in plan.keep if count < len(layers)]
    return [without_layers(BOTH_VARIANT, frozenset(worst[:count]), layers) for count in counts]


def default_recipe(model: nn.Module) -> Recipe:
    """W4A4 of the routed experts, or, in a model without any, of every linear layer of the decoder."""
    base = named()["nvfp4"]
    sparse = any(base.selects(site.name) for site in candidates(model))
    return base.replace(modules=list(ROUTED_EXPERTS if sparse else DECODER_LINEARS))
