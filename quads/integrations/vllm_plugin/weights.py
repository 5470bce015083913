"""What a layer keeps of a weight: codes and scales (or values) as registered parameters, written in place at a refit.

A layer is created with its parameter in checkpoint shape, as vLLM's loaders want it. After loading, `write` puts
derived tensors beside it and a `RefitPort` takes its place. Everything a CUDA graph reads is a registered parameter,
so vLLM's layerwise reload copies new values into the storages that the graphs captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from quads import qdq
from quads.emulation import layout, quantizers
from quads.emulation.quantizers import NVFP4Tensor
from quads.integrations.vllm_plugin.port import RefitPort
from quads.qdq import PackedWeight
from quads.recipes import Recipe

PACKED, SCALE, OUTER, VALUE = "_packed", "_scale", "_outer", "_value"
_ORDERED = {"codes": "_ordered_codes", "scales": "_ordered_scales", "outer": "_ordered_outer"}

if TYPE_CHECKING:
    from quads.kernels.prepack import PreparedWeight


def derive(
    weight: Tensor, recipe: Recipe, name: str, *, rows: list[int], interleave: bool = False, group: object = None
) -> dict[str, Tensor]:
    """The tensors to keep of `weight` [N, K] or [experts, N, K], by suffix; ValueError names `name` (NaN, bad K).

    `rows` are the row counts of the fused parts. `group`: the process group over which the weight is sharded; its
    amax, and so the outer scale, is that of the whole weight on every rank.
    """
    quantizers.check_input(weight, name)
    if recipe.rollout_weights == "fp8":
        parts = weight.split(rows, dim=-2) if weight.ndim == 2 else (weight,)
        return {VALUE: torch.cat([qdq.fp8_weight(part) for part in parts], dim=-2)}
    outer = qdq.outer_from_amax(_amax(weight, group), recipe)
    packed = qdq.pack(weight, recipe, outer, name)
    return {PACKED: packed.packed, SCALE: packed.scales, OUTER: packed.outer} | computed(packed, recipe, interleave)


def computed(packed: PackedWeight, recipe: Recipe, interleave: bool) -> dict[str, Tensor]:
    """What the products read beside the codes: values for unquantised activations; on a GPU the kernels' order.

    interleave: the rows are a gate half and an up half.
    """
    if recipe.rollout_activations == "bf16":
        return {VALUE: quantizers.dequantize(packed.quantized, packed.dtype)}
    if not packed.packed.is_cuda:
        return {}
    from quads.kernels import gemm

    ordered = gemm.prepare_weight(packed, interleave=interleave)
    return {suffix: getattr(ordered, part) for part, suffix in _ORDERED.items()}


def prepared(layer: Module, name: str, interleave: bool) -> PreparedWeight:
    """The weight `name` of `layer` as the kernels take it: views of registered parameters."""
    from quads.kernels.prepack import HopperWeight, NativeWeight

    codes, scales, outer = (layer._parameters[name + suffix].data for suffix in _ORDERED.values())  # type: ignore[union-attr]
    if codes.ndim == 3:
        return NativeWeight(codes, scales, outer)
    n, k = layer._parameters[name].shape[-2:]  # type: ignore[union-attr]
    return HopperWeight(codes, scales, outer, n, k, interleave)


def _amax(weight: Tensor, group: object) -> Tensor:
    amax = weight.abs().amax(dim=(-2, -1), keepdim=weight.ndim > 2).float()
    if group is not None:
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)  # type: ignore[arg-type]
    return amax


def write(layer: Module, name: str, kept: dict[str, Tensor]) -> None:
    """Keep the tensors `kept` of weight `name` on `layer`, in place where storages exist already."""
    for suffix, tensor in kept.items():
        existing = layer._parameters.get(name + suffix)
        if existing is None:
            layer.register_parameter(name + suffix, Parameter(tensor.contiguous(), requires_grad=False))
        else:
            existing.data.copy_(tensor)


def port_of(layer: Module, name: str) -> RefitPort:
    """The port that stands for the weight `name`; RuntimeError where a refit stopped in the middle of that weight."""
    port = layer._parameters[name].weight_loader  # type: ignore[union-attr]
    port.check_complete()
    return port


def loaded(layer: Module, name: str) -> Tensor | None:
    """The checkpoint-shaped weight that waits to be quantised, None where there is only a port."""
    parameter = layer._parameters[name]
    return None if parameter is None or parameter.is_meta else parameter.data


def quantized(layer: Module, name: str) -> NVFP4Tensor:
    """The codes, block scales and outer scale that `layer` keeps of weight `name`."""
    parameters = layer._parameters
    packed, scale, outer = (parameters[name + suffix] for suffix in (PACKED, SCALE, OUTER))
    assert packed is not None and scale is not None and outer is not None
    return NVFP4Tensor(layout.unpack(packed.data), scale.data, outer.data)
