"""The QUADS rollout without an engine: the same module tree, under the numerics that the rollout multiplies in.

    rollout = rollout_numerics(model, recipe, seed=0)
    with rollout, torch.no_grad():
        logits = model(tokens).logits

Each entry quantises the current master weights once (a refit); leaving restores the model. On CPU every product is
emulated exactly; on CUDA it runs through quads.kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quads import qdq
from quads.compensation import BlockSelector, augment, part
from quads.emulation import gemm, quantizers
from quads.emulation.quantizers import NVFP4Tensor
from quads.operand import OperandWeight, Product
from quads.qat import check_weight
from quads.qdq import PackedWeight
from quads.recipes import Recipe
from quads.sites import Site, find_sites


def rollout_numerics(model: nn.Module, recipe: Recipe, *, seed: int = 0) -> Rollout:
    """A re-enterable context in which `model` computes under the rollout numerics of `recipe`."""
    return Rollout(model, recipe, seed)


class Rollout:
    """Context manager; keeps what must outlive one entry: static RAC selections and the random control's draw."""

    def __init__(self, model: nn.Module, recipe: Recipe, seed: int) -> None:
        self.recipe = recipe
        self.sites = [] if recipe.rollout_weights == "bf16" else find_sites(model, recipe)
        self._selectors = {
            site.name: BlockSelector(recipe, site.weight.shape[-1], seed + index)
            for index, site in enumerate(self.sites)
        }
        # One grouped product sees every row of a batch, which is what RAC's `batch` scope is about.
        configs: list[Any] = [getattr(site.module, "config", None) for site in self.sites]
        self._configs = [c for c in configs if getattr(c, "_experts_implementation", None) is not None]
        self._implementations: list[tuple[Any, str]] = []
        self._saved: list[tuple[Site, object]] = []
        self._packed: dict[str, PackedWeight] = {}

    def __enter__(self) -> Rollout:
        for site in self.sites:
            check_weight(site)
        operands = [self._operand(site) for site in self.sites]
        for site, operand in zip(self.sites, operands, strict=True):
            self._saved.append((site, install(site, operand)))
        self._implementations = [(config, config._experts_implementation) for config in self._configs]
        for config in self._configs:
            config._experts_implementation = "grouped_mm"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for config, implementation in self._implementations:
            config._experts_implementation = implementation
        while self._saved:
            site, saved = self._saved.pop()
            restore(site, saved)
        self._packed.clear()
        for selector in self._selectors.values():
            selector.end_of_rollout()

    def packed_weights(self) -> Iterator[PackedWeight]:
        """What the running rollout multiplies by, as `verify_sync` takes it; nothing outside the context."""
        yield from self._packed.values()

    @torch.no_grad()
    def _operand(self, site: Site) -> Tensor:
        weight = site.weight
        if self.recipe.rollout_weights == "fp8":
            value = qdq.fp8_weight(weight)
            product: Product = Fp8Product(value)
        else:
            packed = qdq.pack(weight, self.recipe, qdq.outer_scale(site, self.recipe), site.name)
            self._packed[site.name] = packed
            value = quantizers.dequantize(packed.quantized, weight.dtype)
            if self.recipe.rollout_activations == "bf16":
                return site.k_last(value)
            product = _product(packed, self.recipe, self._selectors[site.name])
        return OperandWeight.wrap(site.k_last(value.to(weight.dtype)), product, k_last=not site.transposed)


def _product(packed: PackedWeight, recipe: Recipe, selector: BlockSelector) -> Product:
    if packed.packed.is_cuda:
        from quads import kernel_product

        if not kernel_product.unavailable():
            parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
            return kernel_product.KernelProduct(packed, selector, whole=not parallel)
    return Nvfp4Product(packed.quantized, recipe, selector, packed.name)


class Fp8Product:
    """Y = Q(X) Q(W)^T of the FP8 baseline: FP32 products and sums, one cast to X's dtype."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def expert(self, index: int) -> Fp8Product:
        return Fp8Product(self.value[index])

    def matmul(self, x: Tensor) -> Tensor:
        return F.linear(qdq.fp8_activation(x), self.value).to(x.dtype)

    def grouped_matmul(self, x: Tensor, ends: Tensor) -> Tensor:
        activation = qdq.fp8_activation(x)
        y = x.new_zeros(x.shape[0], self.value.shape[-2])
        for expert, rows in enumerate(_groups(ends)):
            y[rows] = F.linear(activation[rows], self.value[expert]).to(x.dtype)
        return y


class Nvfp4Product:
    """W4A4, with RAC where the recipe asks for it: one GEMM over K + 16 * blocks columns, alpha after it in FP32."""

    def __init__(self, weight: NVFP4Tensor, recipe: Recipe, selector: BlockSelector, name: str) -> None:
        self.weight, self.recipe, self.selector, self.name = weight, recipe, selector, name

    def expert(self, index: int) -> Nvfp4Product:
        return Nvfp4Product(part(self.weight, index), self.recipe, self.selector, self.name)

    def matmul(self, x: Tensor) -> Tensor:
        ends = torch.tensor([x.shape[0]], dtype=torch.int32)
        experts = NVFP4Tensor(*(t.unsqueeze(0) for t in (self.weight.codes, self.weight.scales, self.weight.outer)))
        return self._product(x, ends, experts)

    def grouped_matmul(self, x: Tensor, ends: Tensor) -> Tensor:
        return self._product(x, ends, self.weight)

    def _product(self, x: Tensor, ends: Tensor, experts: NVFP4Tensor) -> Tensor:
        y = x.new_zeros(x.shape[0], experts.codes.shape[-2])
        used = x[: int(ends[-1])]
        if used.numel() == 0:
            return y
        quantizers.check_input(used, f"activations of {self.name}")
        q = quantizers.quantize(used, granularity=self.recipe.activation_outer)  # type: ignore[arg-type]
        for rows, expert, blocks, keep in self.selector.select(used, q, _groups(ends)):
            a, b = augment(used[rows], part(q, rows), part(experts, expert), blocks, keep)
            y[rows] = gemm.epilogue(gemm.matmul(a, b), (a.outer * b.outer).reshape(-1, 1), x.dtype)
        return y


def _groups(ends: Tensor) -> list[slice]:
    bounds = [0, *ends.tolist()]
    return [slice(start, end) for start, end in itertools.pairwise(bounds)]


def install(site: Site, operand: Tensor) -> object:
    """Put `operand` where the module's forward reads the weight; returns what `restore` needs."""
    parametrizations = getattr(site.module, "parametrizations", None)
    if parametrizations is not None and site.attribute in parametrizations:
        saved = parametrizations[site.attribute]
        parametrizations._modules[site.attribute] = _Constant(operand)
        return saved
    saved = site.module._parameters.pop(site.attribute)
    site.module.__dict__[site.attribute] = operand
    return saved


def restore(site: Site, saved: object) -> None:
    """Undo `install`."""
    if isinstance(saved, nn.Parameter):
        del site.module.__dict__[site.attribute]
        site.module._parameters[site.attribute] = saved
    else:
        site.module.parametrizations._modules[site.attribute] = saved  # type: ignore


class _Constant(nn.Module):
    """Stands in for a ParametrizationList while a rollout runs."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.__dict__["value"] = value

    def forward(self) -> Tensor:
        return self.value
