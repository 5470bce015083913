"""Runs a model once, layer after layer, under many variants at the same time.

Each variant keeps its own hidden states. A decoder layer's weights are fetched and quantised once, every variant
that has left the reference passes through, and the layer is let go: memory is one layer plus the hidden states,
whatever the size of the model. A variant that has not yet met a layer it changes shares the reference's states.
Model code is not copied: `layer.forward` is wrapped, and for the logits the model runs again with its layers answering
the variant's last states. What a family does before, inside and after its layers is what transformers does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from quads.attribution.inputs import InputCache
from quads.attribution.products import Groups, SiteWeights, groups_of, outputs
from quads.attribution.variants import REFERENCE, REFERENCE_VARIANT, Place, Variant
from quads.gap import token_logps
from quads.operand import OperandWeight
from quads.recipes import Recipe, RecipeError
from quads.rollout import install, restore
from quads.sites import Site

Observer = Callable[[SiteWeights, Tensor, Tensor, Groups, InputCache], None]
LayerScope = Callable[[int], AbstractContextManager[None]]
HEAD_TOKENS = 1024  # tokens whose logits are held at once


def resident(index: int) -> AbstractContextManager[None]:
    """The layer scope of a model that is in memory already."""
    return nullcontext()


class LayerwiseRun:
    """One teacher-forced pass of tokens [B, T] (right-padded; `real` is False on padding) through all `variants`.

    `observe(weights, x, tokens, groups, cache)` is called with every product of the reference: its real input rows
    and the flat token index of each. `scope(i)` is entered around decoder layer i (streaming loads it there).
    """

    def __init__(
        self,
        model: nn.Module,
        sites: list[Site],
        recipe: Recipe,
        variants: list[Variant],
        *,
        observe: Observer | None = None,
        scope: LayerScope = resident,
        temperature: float = 1.0,
    ) -> None:
        self.model, self.recipe, self.observe, self.scope, self.temperature = model, recipe, observe, scope, temperature
        self.variants = [REFERENCE_VARIANT, *variants]
        self.layers = decoder_layers(model)
        self.sites = [(index, site) for index, site in enumerate(sites)]
        self.cache = InputCache(recipe.activation_outer)
        self.variant = REFERENCE_VARIANT
        self.tokens_of_rows: Tensor | None = None  # set while an experts module runs
        self._states: dict[str, Tensor] = {}
        self._answered = torch.empty(0)  # the final states that the layers answer while logits are computed
        _check_places([Place(site.name) for site in sites], len(self.layers))

    @torch.no_grad()
    def __call__(self, tokens: Tensor, real: Tensor) -> dict[str, Tensor]:
        """Log-probabilities (float32 [B, T-1]) of each next token by variant; at padding they mean nothing."""
        self.real, self._states = real.flatten(), {}
        with _eager(self.model), _patched(self.layers, self._run_layer):
            self.model(input_ids=tokens, use_cache=False)
        logps = {}
        with _patched(self.layers, self._answer):
            for variant in self.variants:
                logps[variant.name] = self._logps(variant, tokens)
        return logps

    def reference(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Log-probabilities of the model as trained."""
        return self(tokens, real)[REFERENCE]

    def _logps(self, variant: Variant, tokens: Tensor) -> Tensor:
        """From the variant's last states, a few sequences at a time: logits are the largest tensor there is."""
        states, step = self._states.get(variant.name, self._states[REFERENCE]), max(1, HEAD_TOKENS // tokens.shape[1])
        parts = []
        for start in range(0, tokens.shape[0], step):
            self._answered, some = states[start : start + step], tokens[start : start + step]
            logits = self.model(input_ids=some, use_cache=False).logits
            parts += [token_logps(a, b, self.temperature) for a, b in zip(logits, some, strict=True)]
        return torch.stack(parts)

    def _answer(self, index: int, layer: nn.Module, forward: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._answered if index == len(self.layers) - 1 else hidden

    def _run_layer(self, index: int, layer: nn.Module, forward: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        with self.scope(index), self._operands(index) as places:
            self._states.setdefault(REFERENCE, hidden)
            # The reference goes last: until then its old states are where a variant starts from.
            for variant in [*self.variants[1:], REFERENCE_VARIANT]:
                touched = any(variant.touches(place) for place in places)
                if variant is REFERENCE_VARIANT or touched or variant.name in self._states:
                    self.variant = variant
                    self.cache.clear()
                    state = self._states.get(variant.name, self._states[REFERENCE])
                    with self._attention(variant):
                        self._states[variant.name] = _tensor(forward(state, *args, **kwargs))
        self.cache.clear()
        return self._states[REFERENCE]

    @contextmanager
    def _operands(self, index: int) -> Iterator[list[Place]]:
        """Inside it the layer's selected weights answer products with the numerics of `self.variant`."""
        chosen = [SiteWeights(site, self.recipe, i) for i, site in self.sites if Place(site.name).layer == index]
        saved, hooks = [], []
        try:
            for weights in chosen:
                site = weights.site
                operand = OperandWeight.wrap(
                    site.parameter.detach(), SiteProduct(weights, self), k_last=not site.transposed
                )
                saved.append((site, install(site, operand)))
                if site.parameter.ndim == 3:
                    hooks.append(site.module.register_forward_pre_hook(self._note_routing, with_kwargs=True))
            yield [weights.place for weights in chosen]
        finally:
            for hook in hooks:
                hook.remove()
            while saved:
                restore(*saved.pop())

    def _note_routing(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Which token each row of a grouped product belongs to: transformers sorts (token, choice) pairs by expert."""
        chosen = kwargs.get("top_k_index", args[1] if len(args) > 1 else None)
        if chosen is None:
            raise NotImplementedError(f"{type(module).__name__} is not called with top_k_index: routing unknown")
        order = torch.sort(chosen.reshape(-1)).indices
        self.tokens_of_rows = order // chosen.shape[-1]

    @contextmanager
    def _attention(self, variant: Variant) -> Iterator[None]:
        """The engine variant also attends by another kernel; all others as the reference does."""
        config: Any = self.model.config
        if not variant.engine or not getattr(self.model, "_supports_sdpa", False):
            yield
            return
        before, config._attn_implementation = config._attn_implementation, "sdpa"
        try:
            yield
        finally:
            config._attn_implementation = before


class SiteProduct:
    """Answers the products of one weight for whichever variant the run is in. Padding rows come back as zero."""

    def __init__(self, weights: SiteWeights, run: LayerwiseRun) -> None:
        self.weights, self.run = weights, run

    def expert(self, index: int) -> SiteProduct:
        raise NotImplementedError(f"{self.weights.place.name}: experts must run as one grouped product")

    def matmul(self, x: Tensor) -> Tensor:
        ends = torch.tensor([x.shape[0]], dtype=torch.int32)
        return self._product(x, torch.arange(x.shape[0]), ends)

    def grouped_matmul(self, x: Tensor, ends: Tensor) -> Tensor:
        assert self.run.tokens_of_rows is not None
        return self._product(x, self.run.tokens_of_rows, ends)

    def _product(self, x: Tensor, tokens: Tensor, ends: Tensor) -> Tensor:
        run, weights, variant = self.run, self.weights, self.run.variant
        if x.dtype != weights.master.dtype:
            name, stored = weights.place.name, weights.master.dtype
            raise ValueError(f"{name} is {stored} but its activations are {x.dtype}: one dtype a layer")
        if not variant.touches(weights.place) and run.observe is None:
            return outputs(REFERENCE_VARIANT, x, groups_of(ends), weights, None)
        x_real, tokens, groups, kept = _drop_padding(x, tokens, ends, run.real)
        if not variant.touches(weights.place):
            if variant is REFERENCE_VARIANT and run.observe is not None and x_real.shape[0]:
                run.observe(weights, x_real, tokens, groups, run.cache)
            return outputs(REFERENCE_VARIANT, x, groups_of(ends), weights, None)
        rows = run.cache.get(x_real, weights.place.name, weights.index) if variant.activations else None
        y = x.new_zeros(x.shape[0], weights.master.shape[-2])
        y[kept] = outputs(variant, x_real, groups, weights, rows)
        return y


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a transformers causal LM, in order."""
    body = getattr(model, "model", None)
    layers = getattr(body, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise RecipeError(f"{type(model).__name__} has no model.layers: only decoder-only causal LMs are attributed")
    return list(layers)


def _check_places(places: list[Place], count: int) -> None:
    for place in places:
        if not 0 <= place.layer < count:
            raise RecipeError(f"recipe selects {place.name}, which is in no decoder layer: exclude it")


@contextmanager
def _patched(layers: list[nn.Module], wrapper: Callable[..., Any]) -> Iterator[None]:
    """Inside it `wrapper(index, layer, forward, *args, **kwargs)` answers for each layer's forward."""
    try:
        for index, layer in enumerate(layers):
            layer.forward = _bind(wrapper, index, layer, layer.forward)  # type: ignore[method-assign]
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _bind(wrapper: Callable[..., Any], index: int, layer: nn.Module, forward: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: wrapper(index, layer, forward, *args, **kwargs)


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """The reference attends in plain torch with an explicit mask, and experts run as one grouped product."""
    config: Any = model.config
    before = config._attn_implementation, getattr(config, "_experts_implementation", None)
    config._attn_implementation = "eager"
    if before[1] is not None:
        config._experts_implementation = "grouped_mm"
    try:
        yield
    finally:
        config._attn_implementation = before[0]
        if before[1] is not None:
            config._experts_implementation = before[1]


def _tensor(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def _drop_padding(x: Tensor, tokens: Tensor, ends: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Groups, Tensor]:
    """Rows of real tokens only: x, their token indices, their groups, and which rows of x they were (bool [M])."""
    kept = real[tokens]
    if bool(kept.all()) and int(ends[-1]) == x.shape[0]:
        return x, tokens, groups_of(ends), kept
    before = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])
    return x[kept], tokens[kept], groups_of(before[ends.long()]), kept
