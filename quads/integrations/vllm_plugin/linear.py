"""Dense layers of a vLLM model under a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn import functional as F
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.utils import set_weight_attrs

from quads.integrations.vllm_plugin import backends, names, weights
from quads.integrations.vllm_plugin.port import RefitPort
from quads.integrations.vllm_plugin.product import LayerProduct, register_layer
from quads.recipes import Recipe, RecipeError

WEIGHT = "weight"


class _CheckpointShaped(LinearMethodBase):
    """Creates the parameter that vLLM's loaders fill, and shards, in the checkpoint's dtype."""

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight = Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **extra_weight_attrs})
        layer.register_parameter(WEIGHT, weight)


class PlainLinearMethod(_CheckpointShaped):
    """Full precision on CPU. Unlike vLLM's own method it keeps its parameter, so a second load works.

    check: called once the model is built and loaded; whether the recipe selected anything is known then.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def process_weights_after_loading(self, layer: Module) -> None:
        self._check()

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight, bias)  # type: ignore[arg-type]


class StockLinearMethod(UnquantizedLinearMethod):
    """vLLM's own full precision, with the `check` of `PlainLinearMethod`."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def process_weights_after_loading(self, layer: Module) -> None:
        self._check()
        super().process_weights_after_loading(layer)


class QuadsLinearMethod(_CheckpointShaped):
    """One linear layer (`sites`: the trainer's names of its parts) in the numerics of a recipe."""

    def __init__(self, recipe: Recipe, prefix: str, sites: tuple[str, ...], seed: int) -> None:
        self.recipe, self.prefix, self.sites = recipe, prefix, sites
        self.product = LayerProduct(recipe, prefix, WEIGHT, seed)
        self.rows: list[int] = []
        self.key = ""
        self.port: RefitPort | None = None
        self.backend = backends.for_layer(recipe, grouped=False)

    def create_weights(self, layer: Module, *args: Any, **kwargs: Any) -> None:
        backends.check_available(self.backend, self.prefix)
        super().create_weights(layer, *args, **kwargs)
        self.rows = list(kwargs.get("output_partition_sizes") or args[1])
        weight: Any = layer.weight
        shape = backends.Shape((sum(self.rows),), weight.dtype)
        self.backend = backends.for_layer(self.recipe, grouped=False, shape=shape)
        self.product.gemm = self.backend.gemm
        whole = kwargs.get("input_size") or args[2]
        names.check_not_absorbed(self.prefix)
        names.check_k(self.prefix, weight.shape[-1], f" of {whole} on this rank" if whole != weight.shape[-1] else "")
        if self.recipe.weight_block == "16x16" and any(rows % 16 for rows in self.rows):
            raise RecipeError(
                f"recipe field 'weight_block' 16x16 does not divide the {self.rows} rows of {self.prefix}"
            )
        self.key = register_layer(self.prefix, layer)

    def process_weights_after_loading(self, layer: Module) -> None:
        """Quantise what was loaded; called again after each of vLLM's reloads."""
        weight = weights.loaded(layer, WEIGHT)
        if weight is None:
            return
        if self.port is None:
            self.port = RefitPort(self.prefix, layer.weight, lambda new: self._keep(layer, new))  # type: ignore[arg-type]
        self._keep(layer, weight)
        self.port.discard()
        layer.register_parameter(WEIGHT, self.port.parameter())

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            y = torch.ops.quads.vllm_linear(x, self.key, sum(self.rows))
        else:
            y = self.multiply(layer, x)
        return y if bias is None else y + bias

    def multiply(self, layer: Module, x: Tensor) -> Tensor:
        """x [..., K] times the weight, without a bias."""
        weights.port_of(layer, WEIGHT)
        return self.product.matmul(layer, x.reshape(-1, x.shape[-1])).unflatten(0, x.shape[:-1])

    def _keep(self, layer: Module, weight: Tensor) -> None:
        sharded = getattr(layer, "tp_size", 1) > 1
        group = get_tp_group().device_group if sharded else None
        weights.write(layer, WEIGHT, weights.derive(weight, self.recipe, self.prefix, rows=self.rows, group=group))
        self.product.new_weights(layer)

    def refresh(self, layer: Module) -> None:
        """Derive again what the product reads beside the codes, after they were written without this method."""
        self.product.write_augmented(layer)
