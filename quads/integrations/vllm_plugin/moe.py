"""Fused experts of a vLLM model under a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm.envs as envs
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn import functional as F
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from quads.integrations.vllm_plugin import backends, names, weights
from quads.integrations.vllm_plugin.port import RefitPort
from quads.integrations.vllm_plugin.product import (
    LayerProduct,
    expert_rows,
    may_calibrate,
    padding_rows,
    plain_grouped_matmul,
    real_run,
    register_layer,
    shares_over_rows,
)
from quads.recipes import Recipe, RecipeError

W13, W2 = "w13_weight", "w2_weight"


class _Experts(FusedMoEMethodBase):
    """Creates checkpoint-shaped expert tensors; gate and up rows of w13 follow each other, gate first."""

    prefix = "experts"
    key = ""

    def create_weights(
        self,
        layer: Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self._check_architecture(layer)
        k, i = hidden_size, intermediate_size_per_partition
        for name, shape in ((W13, (num_experts, 2 * i, k)), (W2, (num_experts, k, i))):
            weight = Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            set_weight_attrs(weight, extra_weight_attrs)
            layer.register_parameter(name, weight)
        self.key = register_layer(self.prefix, layer)

    def _check_architecture(self, layer: Any) -> None:
        unsupported = {
            "a bias": bool(self.moe.has_bias),
            f"activation {layer.activation.value}": layer.activation.value != "silu",
            "router weights on the input": bool(layer.apply_router_weight_on_input),
        }
        for what, present in unsupported.items():
            if present:
                raise RecipeError(f"{self.prefix} has {what}: quads supports gated SiLU experts without it")

    def get_fused_moe_quant_config(self, layer: Module) -> None:
        return None

    def maybe_make_prepare_finalize(self, *_: Any, **__: Any) -> None:
        """No modular kernel: routed rows are gathered and summed here (vLLM 0.26 asks)."""
        return None

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.quads.vllm_experts(x, topk_weights, topk_ids, self.key)
        return self.multiply(layer, x, topk_weights, topk_ids)

    def multiply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """w2(silu(gate) * up) of each row's experts, weighted and summed: x [M, K], topk_* [M, choices]."""
        experts = layer._parameters[W13].shape[0]
        order, ends = expert_rows(topk_ids, experts, layer.expert_map)
        choices = topk_ids.shape[-1]
        rows = x[order // choices]
        gate, up = self._grouped(layer, W13, rows, ends).chunk(2, dim=-1)
        y = self._grouped(layer, W2, F.silu(gate) * up, ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        weighted = y[back].unflatten(0, (-1, choices)) * topk_weights.unsqueeze(-1)
        return weighted.sum(dim=1).to(x.dtype)

    def _grouped(self, layer: Module, name: str, x: Tensor, ends: Tensor) -> Tensor:
        raise NotImplementedError


class PlainMoEMethod(_Experts):
    """Full precision on CPU. Unlike vLLM's own method it survives a reload with the right weights."""

    def __init__(self, moe: Any, prefix: str) -> None:
        super().__init__(moe)
        self.prefix = prefix

    def _grouped(self, layer: Module, name: str, x: Tensor, ends: Tensor) -> Tensor:
        return plain_grouped_matmul(layer._parameters[name], x, ends)  # type: ignore[arg-type]


class QuadsMoEMethod(_Experts):
    """Routed experts in the numerics of a recipe."""

    def __init__(self, moe: Any, recipe: Recipe, prefix: str, seed: int) -> None:
        super().__init__(moe)
        self.recipe, self.prefix = recipe, prefix
        self.sites = dict(zip((W13, W2), names.expert_sites(prefix), strict=True))
        self.products = {
            name: LayerProduct(recipe, site, name, seed + i) for i, (name, site) in enumerate(self.sites.items())
        }
        self.ports: dict[str, RefitPort] = {}
        self.backend = backends.for_layer(recipe, grouped=True)

    def create_weights(self, layer: Module, *args: Any, **kwargs: Any) -> None:
        backends.check_available(self.backend, self.prefix)
        backends.check_scope(self.recipe, self.prefix)
        super().create_weights(layer, *args, **kwargs)
        for name, site in self.sites.items():
            k = layer._parameters[name].shape[-1]  # type: ignore[union-attr]
            tp = self.moe.moe_parallel_config.tp_size
            names.check_k(site, k, f" on each of {tp} ranks" if name == W2 and tp > 1 else "")
        w13, w2 = (layer._parameters[name] for name in self.sites)
        shape = backends.Shape((w13.shape[1], w2.shape[1]), w13.dtype)  # type: ignore[union-attr]
        self.backend = backends.for_layer(self.recipe, grouped=True, shape=shape)
        for product in self.products.values():
            product.gemm = self.backend.gemm

    def process_weights_after_loading(self, layer: Module) -> None:
        """Quantise what was loaded; called again after each of vLLM's reloads."""
        fresh = {name: weights.loaded(layer, name) for name in self.sites}
        poison = bool(self.ports) and get_tp_group().world_size > 1
        kept = {name: self._derive(name, w, poison=poison) for name, w in fresh.items() if w is not None}
        for name, tensors in kept.items():
            template: Any = layer._parameters[name]
            if name not in self.ports:
                self.ports[name] = RefitPort(self.sites[name], template, self._commit(layer, name))
            self._write(layer, name, tensors)
            self.ports[name].discard()
            layer.register_parameter(name, self.ports[name].parameter())

    def _derive(self, name: str, weight: Tensor, *, poison: bool = False) -> dict[str, Tensor]:
        sharded = self.moe.moe_parallel_config.tp_size > 1
        cut: Any = {"rows": [], "interleave": name == W13, "group": get_tp_group().device_group if sharded else None}
        return weights.derive(weight, self.recipe, self.sites[name], **cut, poison=poison and not sharded)

    def _write(self, layer: Module, name: str, tensors: dict[str, Tensor]) -> None:
        weights.write(layer, name, tensors)
        self.products[name].new_weights(layer)

    def refresh(self, layer: Module) -> None:
        """Derive again what the products read beside the codes, after they were written without this method."""
        for product in self.products.values():
            product.write_augmented(layer)

    def _commit(self, layer: Module, name: str) -> Callable[[Tensor], None]:
        return lambda weight: self._write(layer, name, self._derive(name, weight))

    def multiply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """As the base class, with vLLM's grouped GEMM too; otherwise on a GPU through the fused kernels."""
        if not self.products[W13].on_kernels(x):
            return super().multiply(layer, x, topk_weights, topk_ids)
        padding = padding_rows(x.shape[0]) if shares_over_rows(self.recipe) else None
        if self.backend.gemm:
            ids = topk_ids if padding is None else topk_ids.masked_fill(padding.unsqueeze(1), -1)
            return super().multiply(layer, x, topk_weights, ids)
        from quads.integrations.vllm_plugin import device

        for name in self.sites:
            weights.port_of(layer, name)
        ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        prepared = (weights.prepared(layer, W13), weights.prepared(layer, W2))
        k13, k2 = (layer._parameters[name].shape[-1] for name in (W13, W2))
        rows = (self.products[W13].activations(k13, x.device), self.products[W2].activations(k2, x.device))
        if not real_run():
            device.compile_ahead(prepared, rows)
        how: Any = {"calibrate": may_calibrate(), "invariant": envs.VLLM_BATCH_INVARIANT, "padding": padding}
        elsewhere = layer.expert_map is not None
        return device.experts(x, topk_weights, ids, prepared, rows, elsewhere=elsewhere, **how)

    def _grouped(self, layer: Module, name: str, x: Tensor, ends: Tensor) -> Tensor:
        weights.port_of(layer, name)
        return self.products[name].grouped_matmul(layer, x, ends)
