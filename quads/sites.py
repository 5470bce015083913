"""Which weights of a model a recipe quantises: linear layers and fused expert tensors, found by name.

A fused expert tensor is a 3-D parameter `gate_up_proj`, `up_proj` or `down_proj` of an experts module of
transformers >= 5 (Qwen2/3-MoE, Mixtral, OLMoE, DeepSeek-V3, GPT-OSS, ...). Most store [experts, N, K];
GPT-OSS stores [experts, K, N], which its module says with `is_transposed`.

Shards that inference engines fuse into one GEMM (q/k/v, gate/up, w1/w3, MLA's q_a/kv_a) share one outer scale, the
largest: an engine that takes one scale for the fused weight (vLLM #54974) then computes what the trainer saw.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quads.emulation.quantizers import BLOCK
from quads.precision import param_dtypes
from quads.recipes import Recipe, RecipeError

EXPERT_TENSORS = ("gate_up_proj", "up_proj", "down_proj")
FUSED_BY_ENGINES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
# Never quantised: linear layers of engines that are none here, or the other way round.
ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True, eq=False)
class Site:
    """One quantised weight: parameter `attribute` of `module`, called `name` in recipes and reports."""

    name: str
    module: nn.Module
    attribute: str
    transposed: bool = False  # stored [experts, K, N] instead of [experts, N, K]
    adapter: nn.Module | None = None  # the peft LoRA layer around `module`, merged before quantisation
    partners: tuple[Site, ...] = ()  # the shards, itself included, that share its outer scale
    param_dtype: torch.dtype | None = None  # what FSDP2 gathers the shards of its parameter in, if not in their own

    @property
    def parameter(self) -> Tensor:
        """The stored master weight, also under a parametrisation."""
        parametrizations = getattr(self.module, "parametrizations", None)
        if parametrizations is not None and self.attribute in parametrizations:
            return parametrizations[self.attribute].original
        return getattr(self.module, self.attribute)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the forward sees the parameter: sharded by FSDP2, that of its mixed precision policy.

        Known for FSDP2 only, from the model that `find_sites` was given. Whatever else casts a parameter on its way
        into the forward (FSDP1, DDP's mixed precision, an FSDP2 unit around the model that was given) is not seen.
        Autocast casts Q(W), not the parameter.
        """
        stored = self.parameter
        return self.param_dtype or stored.dtype if isinstance(stored, DTensor) else stored.dtype

    @property
    def stored(self) -> Tensor:
        """The parameter as the forward sees it, still sharded where it is."""
        return self.parameter.to(self.dtype)

    @property
    def weight(self) -> Tensor:
        """The master weight as the forward sees it, adapters merged, with K last: [N, K] or [experts, N, K]."""
        return self.k_last(self.merge(self.stored))

    def k_last(self, stored: Tensor) -> Tensor:
        """`stored` with K last; its own inverse."""
        return stored.transpose(-2, -1) if self.transposed else stored

    def merge(self, parameter: Tensor) -> Tensor:
        """`parameter` plus the active LoRA deltas (differentiable)."""
        if self.adapter is None:
            return parameter
        layer: Any = self.adapter
        deltas = [layer.get_delta_weight(name) for name in layer.active_adapters if name in layer.lora_A]
        whole = not isinstance(parameter, DTensor)  # a gathered parameter takes gathered deltas
        deltas = [delta.full_tensor() if whole and isinstance(delta, DTensor) else delta for delta in deltas]
        return parameter + sum(delta.to(parameter.dtype) for delta in deltas)


def candidates(model: nn.Module) -> Iterator[Site]:
    """Every weight of `model` that a recipe could name, in module order."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, nn.Linear) and not _inside_adapter(name) and not is_router(name):
            parent = modules[name.removesuffix(".base_layer")]
            yield Site(_without_adapter(name), module, "weight", adapter=parent if parent is not module else None)
            continue
        for attribute in EXPERT_TENSORS:
            tensor = _parameter(module, attribute)
            if tensor is not None and tensor.ndim == 3:
                transposed = bool(getattr(module, "is_transposed", False))
                yield Site(f"{_without_adapter(name)}.{attribute}", module, attribute, transposed)


def is_router(name: str) -> bool:
    """Whether the linear layer `name` chooses experts: it stays in full precision whatever a recipe names."""
    return name.removesuffix(".base_layer").rpartition(".")[2] in ROUTERS


def find_sites(model: nn.Module, recipe: Recipe) -> list[Site]:
    """The weights that `recipe` selects, partners resolved; RecipeError where there is none or one that cannot be."""
    chosen = [site for site in candidates(model) if recipe.selects(site.name)]
    if not chosen:
        names = [site.name for site in candidates(model)]
        shown = ", ".join(names[:3] + names[-1:])
        raise RecipeError(
            f"recipe field 'modules' {list(recipe.modules)} selects no linear layer of {type(model).__name__};"
            f" it has {len(names)}, for example {shown}"
        )
    dtypes = dict(param_dtypes(model))
    chosen = [replace(site, param_dtype=dtypes.get(site.module)) for site in chosen]
    for site in chosen:
        _check(model, site)
    return [replace(site, partners=_partners(site, chosen)) for site in chosen]


def _parameter(module: nn.Module, attribute: str) -> Tensor | None:
    if attribute in module._parameters:
        return module._parameters[attribute]
    parametrizations = getattr(module, "parametrizations", None)
    if isinstance(parametrizations, nn.ModuleDict) and attribute in parametrizations:
        return parametrizations[attribute].original
    return None


def _inside_adapter(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


def _without_adapter(name: str) -> str:
    """peft wraps a linear layer as `<name>.base_layer` and a model as `base_model.model`: call it by its own name."""
    return re.sub(r"^base_model\.model\.", "", name).removesuffix(".base_layer")


def _check(model: nn.Module, site: Site) -> None:
    k = site.k_last(site.parameter).shape[-1]
    if k % BLOCK:
        raise RecipeError(f"recipe selects {site.name}, whose K = {k} is not a multiple of {BLOCK}")
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if embedding is not None and getattr(embedding, "weight", None) is site.parameter:
        raise RecipeError(f"recipe selects {site.name}, which is tied to the input embeddings: exclude it")
    adapted = [] if site.adapter is None else [p for p in site.adapter.parameters() if isinstance(p, DTensor)]
    if site.param_dtype is not None and any(p.dtype != site.param_dtype for p in adapted):
        raise RecipeError(
            f"recipe selects {site.name}, whose LoRA adapter FSDP2 casts to {site.param_dtype}: what the forward merges"
            " is not known outside it; keep adapter and weight in that dtype"
        )


def _partners(site: Site, chosen: list[Site]) -> tuple[Site, ...]:
    parent, _, leaf = site.name.rpartition(".")
    for family in FUSED_BY_ENGINES:
        if leaf in family and site.attribute == "weight":
            names = {f"{parent}.{member}" for member in family}
            partners = tuple(other for other in chosen if other.name in names)
            if len(dtypes := {str(other.dtype) for other in partners}) > 1:
                raise RecipeError(f"{site.name} shares its outer scale with weights of another dtype: {sorted(dtypes)}")
            return partners
    return (site,)
