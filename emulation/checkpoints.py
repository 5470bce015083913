"""Checkpoint conventions: what ModelOpt and compressed-tensors store for one quantised linear layer, both ways.

    ModelOpt             weight          weight_scale  weight_scale_2       input_scale          multipliers amax/2688
    compressed-tensors   weight_packed   weight_scale  weight_global_scale  input_global_scale   divisors 2688/amax, [1]
Packed codes and block scales are the same bytes; only names and the direction of the two outer scales differ.
fl(1 / fl(1 / x)) != x for 1,439,258 of 2^23 significands, and then no other float32 divisor inverts to x either: a
conversion keeps every code and block scale, but not always the last bit of an outer scale.

Fused layers (w13, qkv) carry one outer scale for shards that were quantised under their own. Taking one scale for
all rescales the others (a public fault of several engines); `merge_shards` keeps every shard's scale, and folds the
ratio into the block scales only where that is exact, or on request with the error named.
Sources: compressed-tensors 0.20.1 NVFP4PackedCompressor and ModelOptNvfp4Converter, nvidia-modelopt 0.47.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quads.emulation import formats, layout
from quads.emulation.quantizers import NVFP4Tensor


@dataclass(frozen=True)
class Convention:
    """Tensor names of one convention, below the layer's own name, and the direction of its outer scales."""

    name: str
    weight: str
    scale: str
    outer: str
    input_outer: str
    divides: bool


MODELOPT = Convention("modelopt", "weight", "weight_scale", "weight_scale_2", "input_scale", divides=False)
COMPRESSED_TENSORS = Convention(
    "compressed-tensors", "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", divides=True
)
CONVENTIONS = {convention.name: convention for convention in (MODELOPT, COMPRESSED_TENSORS)}


@dataclass(frozen=True)
class Layer:
    """One linear layer: weight [N, K] with outer scale [], and the activation's outer scale (multiplier) if any."""

    weight: NVFP4Tensor
    input_outer: Tensor | None = None


def to_divisor(multiplier: Tensor) -> Tensor:
    """fl(1 / multiplier), float32: of all divisors the one whose inverse is nearest to the multiplier."""
    return 1.0 / multiplier.float()


def to_multiplier(divisor: Tensor) -> Tensor:
    """fl(1 / divisor): what a reader of the compressed-tensors convention computes with."""
    return 1.0 / divisor.float()


def write(layer: Layer, convention: Convention) -> dict[str, Tensor]:
    """The tensors of `layer` under the names of `convention`: uint8 [N, K/2], float8_e4m3fn [N, K/16], float32."""
    tensors = {
        convention.weight: layer.weight.packed,
        convention.scale: layer.weight.scales.view(torch.float8_e4m3fn),
        convention.outer: _stored(layer.weight.outer, convention),
    }
    if layer.input_outer is not None:
        tensors[convention.input_outer] = _stored(layer.input_outer, convention)
    return tensors


def read(tensors: dict[str, Tensor], convention: Convention) -> Layer:
    """Inverse of `write`. ValueError names a tensor that is missing or whose shape or dtype does not fit."""
    packed = _tensor(tensors, convention.weight, torch.uint8)
    scales = _tensor(tensors, convention.scale, torch.float8_e4m3fn).view(torch.uint8)
    if packed.ndim != 2 or scales.shape != (packed.shape[0], packed.shape[1] // 8) or packed.shape[1] % 8:
        raise ValueError(
            f"{convention.scale} of shape {tuple(scales.shape)} does not fit {convention.weight} of shape "
            f"{tuple(packed.shape)}: one scale for each 8 bytes of a row"
        )
    if bool(((scales & 0x7F) == 0x7F).any()):
        raise ValueError(f"{convention.scale} holds the NaN byte 0x7F: the checkpoint is damaged")
    outer = _loaded(tensors, convention.outer, convention)
    has_input = convention.input_outer in tensors
    input_outer = _loaded(tensors, convention.input_outer, convention) if has_input else None
    return Layer(NVFP4Tensor(layout.unpack(packed), scales, outer), input_outer)


def convert(tensors: dict[str, Tensor], source: Convention, target: Convention) -> dict[str, Tensor]:
    """The tensors of one layer from one convention in the other. Codes and block scales keep their bytes."""
    return write(read(tensors, source), target)


@dataclass(frozen=True)
class Merged:
    """Shards stacked along N under one outer scale []; `exact` says for each shard whether its values are unchanged."""

    weight: NVFP4Tensor
    exact: tuple[bool, ...]


def merge_shards(shards: list[NVFP4Tensor]) -> Merged:
    """One [sum of N, K] weight of `shards` (w1 and w3, or q, k and v) under their largest multiplier.

    A shard of a smaller multiplier has its block scales rescaled by the ratio and rounded to E4M3 (codes stay): exact
    where the ratio is a power of two and no scale becomes subnormal, else off by up to 2^-4 of a value, more below
    the smallest normal scale 2^-6. Equal multipliers change nothing. Taking the largest *divisor* instead picks the
    smallest amax, and neither is right without the rescaling.
    """
    if not shards or any(shard.outer.ndim for shard in shards):
        raise ValueError("shards to merge: needs at least one, each with one outer scale of shape []")
    if len({shard.codes.shape[-1] for shard in shards}) > 1:
        raise ValueError(f"shards to merge have different K: {[shard.codes.shape[-1] for shard in shards]}")
    outer = torch.stack([shard.outer for shard in shards]).amax()
    scales = [_rescaled(shard, outer) for shard in shards]
    exact = tuple(_same_values(shard, s, outer) for shard, s in zip(shards, scales, strict=True))
    return Merged(NVFP4Tensor(torch.cat([shard.codes for shard in shards]), torch.cat(scales), outer), exact)


def _rescaled(shard: NVFP4Tensor, outer: Tensor) -> Tensor:
    if bool(shard.outer == outer):
        return shard.scales
    wanted = formats.decode(shard.scales, formats.E4M3) * (shard.outer / outer)
    return formats.encode(wanted, formats.E4M3)


def _same_values(shard: NVFP4Tensor, scales: Tensor, outer: Tensor) -> bool:
    before = formats.decode(shard.scales, formats.E4M3).double() * shard.outer.double()
    return bool((formats.decode(scales, formats.E4M3).double() * outer.double() == before).all())


def _stored(multiplier: Tensor, convention: Convention) -> Tensor:
    if multiplier.numel() != 1:
        raise ValueError(f"outer scale of shape {tuple(multiplier.shape)}: a checkpoint holds one a tensor")
    return to_divisor(multiplier).reshape(1) if convention.divides else multiplier.float().reshape(())


def _loaded(tensors: dict[str, Tensor], name: str, convention: Convention) -> Tensor:
    stored = _tensor(tensors, name, torch.float32)
    if stored.numel() != 1 or not bool(stored.isfinite().all()) or not bool((stored > 0).all()):
        raise ValueError(f"{name} is {stored.tolist()}: needs one positive finite number")
    stored = stored.reshape(())
    return to_multiplier(stored) if convention.divides else stored


def _tensor(tensors: dict[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    if name not in tensors:
        raise ValueError(f"{name} is missing; the layer has {', '.join(sorted(tensors)) or 'no tensors'}")
    if tensors[name].dtype != dtype:
        raise ValueError(f"{name} has dtype {tensors[name].dtype}, not {dtype}")
    return tensors[name]
