"""What a layer keeps of a weight: codes and scales (or values) as registered parameters, written in place at a refit.

A layer is created with its parameter in checkpoint shape, as vLLM's loaders want it. After loading, `write` puts
derived tensors beside it and a `RefitPort` takes its place. Everything a CUDA graph reads is a registered parameter,
so vLLM's layerwise reload copies new values into the storages that the graphs captured.

Codes are kept once: as exported, or on a GPU in the order that its kernels read (`order_on`). `exported` gives the
former from either, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from quads import qdq
from quads.emulation import quantizers
from quads.emulation.quantizers import NVFP4Tensor
from quads.integrations.vllm_plugin.port import RefitPort
from quads.kernels import prepack
from quads.kernels.prepack import HopperWeight, NativeWeight, PreparedWeight
from quads.qdq import PackedWeight
from quads.recipes import Recipe

VALUE = "_value"
_EXPORTED = {"packed": "_packed", "scales": "_scale", "outer": "_outer"}
_ORDERED = {"codes": "_ordered_codes", "scales": "_ordered_scales", "outer": "_ordered_outer"}  # outer is written last

Order = Callable[..., PreparedWeight]


def order_on(device: torch.device) -> Order | None:
    """What reorders the weights of `device` for its kernels, as `gemm.prepare_weight`; None: kept as exported."""
    if device.type != "cuda":
        return None
    from quads.kernels import gemm

    return gemm.prepare_weight


def derive(
    weight: Tensor,
    recipe: Recipe,
    name: str,
    *,
    rows: list[int],
    interleave: bool = False,
    group: object = None,
    poison: bool = False,
) -> dict[str, Tensor]:
    """The tensors to keep of `weight` [N, K] or [experts, N, K], by suffix; ValueError names `name` (NaN, bad K).

    `rows` are the row counts of the fused parts. interleave: the rows are a gate half and an up half. `group`: the
    process group over which the weight is sharded; its amax, and so the outer scale, is that of the whole weight on
    every rank, and all refuse what one of them holds. poison: this rank alone holds the weight, and others would wait
    for it in the next collective: NaN or Inf make the outer scale infinite, which is refused once every rank is done.
    """
    if recipe.rollout_weights == "fp8":
        quantizers.check_input(weight, name)
        parts = weight.split(rows, dim=-2) if weight.ndim == 2 else (weight,)
        return {VALUE: torch.cat([qdq.fp8_weight(part) for part in parts], dim=-2)}
    quantizers.check_input(weight, name, finite=False)
    amax = _amax(weight, group)
    finite = bool(amax.isfinite().all())
    if not finite and not poison:
        quantizers.check_input(weight, name)
        raise ValueError(f"{name} holds NaN or Inf in the part of another rank: refuse to quantise it")
    if not finite:
        weight, amax = weight.nan_to_num(0.0, 0.0, 0.0), torch.zeros_like(amax)
    packed = qdq.pack(weight, recipe, qdq.outer_from_amax(amax, recipe), name)
    if not finite:
        packed = replace(packed, outer=torch.full_like(packed.outer, torch.inf))
    order = order_on(weight.device)
    if recipe.rollout_activations != "bf16" and order is not None:
        return _by_suffix(order(packed, interleave=interleave), _ORDERED)
    return _by_suffix(packed, _EXPORTED) | _values(packed, recipe)


def _values(packed: PackedWeight, recipe: Recipe) -> dict[str, Tensor]:
    """What unquantised activations are multiplied by."""
    if recipe.rollout_activations != "bf16":
        return {}
    return {VALUE: quantizers.dequantize(packed.quantized, packed.dtype)}


def _by_suffix(weight: object, suffixes: dict[str, str]) -> dict[str, Tensor]:
    return {suffix: getattr(weight, field) for field, suffix in suffixes.items()}


def _amax(weight: Tensor, group: object) -> Tensor:
    """Largest magnitude (float32), [] or [experts, 1, 1]; infinite where a NaN is, which a maximum may lose."""
    amax = weight.abs().amax(dim=(-2, -1), keepdim=weight.ndim > 2).float()
    amax = torch.where(amax.isfinite(), amax, torch.inf)
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


def keeps_codes(layer: Module, name: str) -> bool:
    """Whether `layer` keeps weight `name` as codes and scales, in whatever order."""
    return name + _EXPORTED["packed"] in layer._parameters or _is_ordered(layer, name)


def _is_ordered(layer: Module, name: str) -> bool:
    return name + _ORDERED["codes"] in layer._parameters


def _fields(layer: Module, name: str, suffixes: dict[str, str]) -> tuple[Tensor, ...]:
    return tuple(layer._parameters[name + suffix].data for suffix in suffixes.values())  # type: ignore[union-attr]


def prepared(layer: Module, name: str) -> PreparedWeight:
    """The weight `name` of `layer` as the kernels take it: views of registered parameters."""
    codes, scales, outer = _fields(layer, name, _ORDERED)
    if codes.ndim == 3:
        return NativeWeight(codes, scales, outer)
    n, k = layer._parameters[name].shape[-2:]  # type: ignore[union-attr]
    return HopperWeight(codes, scales, outer, n, k, interleaved=outer.ndim == 2)


def exported(layer: Module, name: str) -> PackedWeight:
    """Weight `name` of `layer` as it was exported: what is kept, or made from the kernels' order."""
    weight = layer._parameters[name]
    assert weight is not None
    if not _is_ordered(layer, name):
        packed, scales, outer = _fields(layer, name, _EXPORTED)
        return PackedWeight(name, packed, scales, outer, weight.dtype)
    back = prepack.exported(prepared(layer, name))
    outer = back.outer.reshape(len(back.outer), -1)[:, 0]  # gate and up share one
    if weight.ndim == 3:
        return PackedWeight(name, back.packed, back.scales, outer.reshape(-1, 1, 1), weight.dtype)
    return PackedWeight(name, back.packed[0], back.scales[0], outer.reshape(()), weight.dtype)


def rewrite(layer: Module, name: str, packed: PackedWeight, recipe: Recipe) -> None:
    """Keep `packed` as weight `name` of `layer`, in place: its storages are there."""
    order = order_on(packed.packed.device)
    if order is None or not _is_ordered(layer, name):
        write(layer, name, _by_suffix(packed, _EXPORTED) | _values(packed, recipe))
    else:
        held = prepared(layer, name)
        order(packed, interleave=held.outer.ndim == 2, out=held)


def quantized(layer: Module, name: str) -> NVFP4Tensor:
    """The codes, block scales and outer scale that `layer` keeps of weight `name`."""
    return exported(layer, name).quantized
