"""Y = X W^T under a recipe, for one layer: the emulator on CPU; on CUDA quads.kernels or one of vLLM's own GEMMs.

On CPU a layer computes with `quads.rollout`'s own products, so an engine and the engine-free rollout give the same
bits for the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import vllm.envs as envs
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available

from quads import qdq, rollout
from quads.compensation import BlockSelector
from quads.integrations.vllm_plugin import fp4, weights
from quads.integrations.vllm_plugin.fp4 import Fp4Weight
from quads.integrations.vllm_plugin.fp4_gemms import Gemm
from quads.kernels.prepack import NativeWeight
from quads.recipes import Recipe

if TYPE_CHECKING:
    from quads.integrations.vllm_plugin.device import Activations


class LayerProduct:
    """The products of weight `name` of a layer; keeps the layer's RAC selection between calls."""

    def __init__(self, recipe: Recipe, label: str, name: str, seed: int) -> None:
        self.recipe, self.label, self.name, self.seed = recipe, label, name, seed
        self.gemm: Gemm | None = None  # one of vLLM's own, where the layer's backend is it
        self._selector: BlockSelector | None = None
        self._activations: Activations | None = None

    def matmul(self, layer: Module, x: Tensor) -> Tensor:
        """x [M, K] times the weight [N, K]: [M, N]."""
        if self.on_kernels(x):
            from quads.integrations.vllm_plugin import device

            rows = self.activations(x.shape[-1], x.device)
            if self.gemm:
                return device.fp4_matmul(_tokens(x), self._fp4_weight(layer), rows, calibrate=may_calibrate())
            weight = weights.prepared(layer, self.name)
            x = _tokens(x) if shares_over_rows(self.recipe) else x
            return device.matmul(x, weight, rows, calibrate=may_calibrate(), invariant=envs.VLLM_BATCH_INVARIANT)
        value = layer._parameters.get(self.name + weights.VALUE)
        if self.recipe.rollout_weights == "fp8":
            return rollout.Fp8Product(value.data).matmul(x)  # type: ignore[union-attr]
        if value is not None:
            return F.linear(x, value)
        return self._nvfp4(layer, x.shape[-1]).matmul(_checked(x))

    def grouped_matmul(self, layer: Module, x: Tensor, ends: Tensor) -> Tensor:
        """Rows of x [M, K], sorted by expert and ending at `ends`, times [experts, N, K]; rows past the end give 0."""
        if self.gemm:
            from quads.integrations.vllm_plugin import device

            weight, rows = self._fp4_weight(layer), self.activations(x.shape[-1], x.device)
            return device.fp4_grouped_matmul(x, weight, rows, ends, calibrate=may_calibrate())
        value = layer._parameters.get(self.name + weights.VALUE)
        if value is not None and self.recipe.rollout_weights == "fp8":
            return plain_grouped_matmul(value, qdq.fp8_activation(x), ends).to(x.dtype)
        if value is not None:
            return plain_grouped_matmul(value, x, ends)
        return self._nvfp4(layer, x.shape[-1]).grouped_matmul(_checked(x), ends)

    def on_kernels(self, x: Tensor) -> bool:
        """Whether rows like `x` go through quads.kernels or one of vLLM's own GEMMs."""
        return (x.is_cuda or self.gemm is not None) and self.recipe.rollout_activations == "nvfp4"

    def activations(self, k: int, device: torch.device) -> Activations:
        """What quantises the rows on a GPU; made in the first warm-up, kept for the engine's life."""
        from quads.integrations.vllm_plugin.device import Activations

        if self._activations is None:
            with torch.inference_mode(False):  # vLLM runs under it, and a refit, which does not, writes these buffers
                self._activations = Activations(self.recipe, k, self.seed, device)
        if _capturing():
            self._activations.forget_warm_up()
        return self._activations

    def new_weights(self, layer: Module) -> None:
        """A refit ends a rollout: a static or random selection grows older. The first weights end none."""
        if self._selector is not None:
            self._selector.end_of_rollout()
        if self._activations is not None and self._activations.list is not None:
            self._activations.list.end_of_rollout()
        self.write_augmented(layer)

    def write_augmented(self, layer: Module) -> None:
        """Write [W, W_sel] for vLLM's GEMM, in place where the storage exists; after every change of the codes."""
        if self.gemm is None:
            return
        native = self._native(layer)
        fp4.check_one_scale(native, self.label)
        rows = self.activations(native.k, native.codes.device)
        kept = fp4.augmented(native, rows.extra)
        weights.write(layer, self.name, kept)
        if kept:
            rows.repeat(self._fp4_weight(layer), rows.fixed)

    def _native(self, layer: Module) -> NativeWeight:
        prepared = weights.prepared(layer, self.name)
        assert isinstance(prepared, NativeWeight), "a Blackwell layer keeps its codes in their order"
        return prepared

    def _fp4_weight(self, layer: Module) -> Fp4Weight:
        assert self.gemm is not None
        return fp4.weight_of(layer, self.name, self._native(layer), self.gemm.run)

    def _nvfp4(self, layer: Module, k: int) -> rollout.Nvfp4Product:
        selector = BlockSelector(self.recipe, k, self.seed)
        if real_run():
            self._selector = selector = self._selector or selector
        return rollout.Nvfp4Product(weights.quantized(layer, self.name), self.recipe, selector, self.label)


def plain_grouped_matmul(value: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """One product an expert, in the dtype of `x`; on a GPU without waiting for `ends`, as CUDA graphs demand."""
    if x.is_cuda:
        return _grouped_on_gpu(value, x, ends)
    y = x.new_zeros(x.shape[0], value.shape[-2])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            y[start:end] = F.linear(x[start:end], value[expert])
        start = end
    return y


def _grouped_on_gpu(value: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """bfloat16 through torch's grouped product; other dtypes have none: every expert's product of all rows."""
    row = torch.arange(x.shape[0], device=x.device)
    if x.dtype == value.dtype == torch.bfloat16:
        y = F.grouped_mm(x, value.transpose(-2, -1), offs=ends)
        return torch.where((row < ends[-1]).unsqueeze(1), y, 0.0)
    owner = torch.searchsorted(ends, row, right=True).unsqueeze(1)
    y = x.new_zeros(x.shape[0], value.shape[-2])
    for expert, weight in enumerate(value):
        y = torch.where(owner == expert, F.linear(x, weight), y)
    return y


def real_run() -> bool:
    """False while vLLM warms up or profiles with dummy tokens, which must not calibrate a static selection."""
    return is_forward_context_available() and get_forward_context().attn_metadata is not None


def shares_over_rows(recipe: Recipe) -> bool:
    """Whether the rows of a call share an outer scale or choose their blocks together."""
    return recipe.activation_outer == "tensor" or (recipe.rac_ratio > 0 and recipe.rac_scope in ("batch", "tile"))


def padding_rows(rows: int) -> Tensor | None:
    """bool [rows], True where a CUDA graph pads the batch (their KV slot is -1); None where the engine does not say.

    The slots lie in a buffer that vLLM writes before each step, so a captured graph sees those of its replay.
    """
    slots = get_forward_context().slot_mapping if is_forward_context_available() else None
    first = next(iter(slots.values()), None) if isinstance(slots, dict) else None
    return None if first is None or first.shape[0] < rows else first[:rows] < 0


def _tokens(x: Tensor) -> Tensor:
    """`x` with zeros in the rows that a CUDA graph pads it with: their garbage must not decide what rows share."""
    padding = padding_rows(x.shape[0])
    return x if padding is None else x.masked_fill(padding.unsqueeze(1), 0.0)


def may_calibrate() -> bool:
    """Whether a static selection may be taken from this call: real tokens, and not while a CUDA graph is captured."""
    return real_run() and not _capturing()


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _checked(x: Tensor) -> Tensor:
    """`x`; in a warm-up its garbage (attention leaves it uninitialised then) without NaN, which products refuse."""
    return x if real_run() else x.nan_to_num(0.0, 0.0, 0.0)


def expert_rows(topk_ids: Tensor, experts: int, expert_map: Tensor | None) -> tuple[Tensor, Tensor]:
    """(order, ends): the order that sorts (token, choice) pairs by local expert, and where each expert's rows end.

    Pairs without an expert (a negative id) or whose expert lives on another rank (-1 in `expert_map`) come last, past
    every end.
    """
    ids = topk_ids.reshape(-1).long()
    if expert_map is not None:
        ids = torch.where(ids < 0, ids, expert_map[ids.clamp(min=0)].long())
    ids = torch.where(ids < 0, experts, ids)
    order = torch.sort(ids, stable=True).indices
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))
    return order, counts[:experts].cumsum(0).to(torch.int32)


# Inductor must not trace the emulator, nor kernels that choose blocks: one opaque op a layer, found by its key in the
# engine's forward context, as vLLM's own attention and MoE ops do it.
_LIBRARY = torch.library.Library("quads", "FRAGMENT")
_LIBRARY.define("vllm_linear(Tensor x, str layer, int n) -> Tensor")
_LIBRARY.define("vllm_experts(Tensor x, Tensor topk_weights, Tensor topk_ids, str layer) -> Tensor")


def _run(layer: str, *inputs: Tensor) -> Tensor:
    module: Any = get_forward_context().no_compile_layers[layer]
    return module.quant_method.multiply(module, *inputs)


_LIBRARY.impl("vllm_linear", lambda x, layer, n: _run(layer, x), "CompositeExplicitAutograd")
_LIBRARY.impl("vllm_linear", lambda x, layer, n: x.new_empty((*x.shape[:-1], n)), "Meta")
_LIBRARY.impl("vllm_experts", lambda x, w, ids, layer: _run(layer, x, w, ids), "CompositeExplicitAutograd")
_LIBRARY.impl("vllm_experts", lambda x, w, ids, layer: torch.empty_like(x), "Meta")


def register_layer(prefix: str, layer: Module) -> str:
    """The key under which the ops find `layer` in the engine that is being built."""
    key = f"quads.{prefix}"
    get_current_vllm_config().compilation_config.static_forward_context[key] = layer
    return key
