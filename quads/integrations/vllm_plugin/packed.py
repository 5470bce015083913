"""Packed codes and scales in and out of an engine's layers, under the trainer's names.

A packed weight is cut for tensor and expert parallelism by vLLM's own weight loaders, which cut codes and block
scales as they cut the weight: along K by whole bytes and whole blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from quads.emulation.quantizers import BLOCK
from quads.integrations.vllm_plugin import weights
from quads.integrations.vllm_plugin.linear import WEIGHT, QuadsLinearMethod
from quads.integrations.vllm_plugin.moe import W2, W13, QuadsMoEMethod
from quads.sync import PackedWeight

_SHARD_IDS: dict[int, tuple[Any, ...]] = {1: (None,), 2: (0, 1), 3: ("q", "k", "v")}
_NAN, _SIGN = 0x7F, 0x80
_STORED = (weights.PACKED, weights.SCALE, weights.OUTER)


@dataclass(frozen=True)
class _Slot:
    """Where one packed weight goes: a layer, its parameter, and the loader's shard ids of its parts."""

    layer: nn.Module
    name: str
    shards: tuple[Any, ...]
    expert: bool


def slots(model: nn.Module) -> dict[str, _Slot]:
    """Every weight that `model` keeps packed, by the trainer's name."""
    found: dict[str, _Slot] = {}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuadsLinearMethod) and WEIGHT + weights.PACKED in module._parameters:
            for site, shard in zip(method.sites, _SHARD_IDS[len(method.sites)], strict=True):
                found[site] = _Slot(module, WEIGHT, (shard,), False)
        if isinstance(method, QuadsMoEMethod) and W13 + weights.PACKED in module._parameters:
            found[method.sites[W13]] = _Slot(module, W13, ("w1", "w3"), True)
            found[method.sites[W2]] = _Slot(module, W2, ("w2",), True)
    return found


def load(model: nn.Module, update: list[PackedWeight], sums: Mapping[str, str] | None = None) -> None:
    """Check all of `update`, then write it in place. ValueError names the weight and the rule.

    sums: what `checksums` gave where the update was made; a weight that differs from it, or lacks one, is refused.
    """
    known = slots(model)
    if sums is not None:
        for name, digest in checksums(update).items():
            if sums.get(name) != digest:
                raise ValueError(f"packed weight {name} differs from its checksum: the update is corrupted")
    given = {weight.name: weight for weight in update}
    for weight in update:
        if weight.name not in known:
            raise ValueError(f"packed weight {weight.name} is not one that this engine keeps packed")
        _check(weight)
    for outer in _shared_outers(known, given):
        outer.slot.layer._parameters[outer.slot.name + weights.OUTER].data.copy_(outer.value)  # type: ignore[union-attr]
    for weight in update:
        _write(known[weight.name], weight)
    for slot in {(id(s.layer), s.name): s for name, s in known.items() if name in given}.values():
        _refresh(slot)


def _check(weight: PackedWeight) -> None:
    name = weight.name
    for field, tensor, dtype in (
        ("packed", weight.packed, torch.uint8),
        ("scales", weight.scales, torch.uint8),
        ("outer", weight.outer, torch.float32),
    ):
        if tensor.dtype != dtype:
            raise ValueError(f"packed weight {name}: {field} has dtype {tensor.dtype}, not {dtype}")
    if weight.packed.shape != (*weight.scales.shape[:-1], weight.scales.shape[-1] * BLOCK // 2):
        shapes = f"{tuple(weight.packed.shape)} and {tuple(weight.scales.shape)}"
        raise ValueError(f"packed weight {name}: packed [..., K/2] and scales [..., K/16] have shapes {shapes}")
    if bool(((weight.scales & _SIGN) != 0).any() | ((weight.scales & 0x7F) == _NAN).any()):
        raise ValueError(f"packed weight {name}: scales hold a NaN or a negative E4M3 code: the update is corrupted")
    if not bool((weight.outer.isfinite() & (weight.outer > 0)).all()):
        raise ValueError(f"packed weight {name}: outer is not finite and positive: the update is corrupted")


@dataclass(frozen=True, eq=False)
class _Outer:
    slot: _Slot
    value: Tensor


def _shared_outers(known: dict[str, _Slot], given: dict[str, PackedWeight]) -> Iterator[_Outer]:
    """The outer scale of each layer in `given`; ValueError where the parts of a fused layer disagree or lack one."""
    layers: dict[tuple[int, str], list[str]] = {}
    for name, slot in known.items():
        layers.setdefault((id(slot.layer), slot.name), []).append(name)
    for names in layers.values():
        there = [name for name in names if name in given]
        if not there:
            continue
        if len(there) < len(names):
            missing = next(name for name in names if name not in given)
            raise ValueError(f"packed update holds {there[0]} but not {missing}: they share one layer and outer scale")
        slot, first = known[there[0]], given[there[0]].outer
        for name in there[1:]:
            if not torch.equal(given[name].outer, first):
                raise ValueError(f"packed weights {there[0]} and {name} of one layer have different outer scales")
        yield _Outer(slot, _local_experts(slot, first) if slot.expert else first.reshape(()))


def _local_experts(slot: _Slot, outer: Tensor) -> Tensor:
    layer: Any = slot.layer
    return outer if layer.expert_map is None else outer[layer.expert_map.to(outer.device) >= 0]


def _write(slot: _Slot, weight: PackedWeight) -> None:
    for suffix, tensor in ((weights.PACKED, weight.packed), (weights.SCALE, weight.scales)):
        target: Any = slot.layer._parameters[slot.name + suffix]
        port = weights.port_of(slot.layer, slot.name)
        try:
            if slot.expert:
                _write_experts(port, target, slot, tensor)
            else:
                port.load_into(target.data, tensor.to(target.device), *(s for s in slot.shards if s is not None))
        except (AssertionError, RuntimeError, ValueError) as error:
            shapes = f"{tuple(tensor.shape)} does not fit {tuple(target.shape)}"
            raise ValueError(f"packed weight {weight.name}: {suffix.strip('_')} of shape {shapes}") from error


def _write_experts(port: Any, target: Parameter, slot: _Slot, tensor: Tensor) -> None:
    for expert, rows in enumerate(tensor):
        for shard, part in zip(slot.shards, rows.chunk(len(slot.shards), dim=0), strict=True):
            port.load_into(target.data, part.to(target.device), slot.name, shard, expert)


def _refresh(slot: _Slot) -> None:
    """Compute again what the products read beside the codes, in place."""
    layer: Any = slot.layer
    codes, scales, outer = (layer._parameters[slot.name + suffix].data for suffix in _STORED)
    weight = PackedWeight(slot.name, codes, scales, outer, layer._parameters[slot.name].dtype)
    recipe = layer.quant_method.recipe
    for suffix, tensor in weights.computed(weight, recipe, interleave=slot.name == W13).items():
        layer._parameters[slot.name + suffix].data.copy_(tensor)


def held(model: nn.Module) -> Iterator[PackedWeight]:
    """What `model` multiplies by, one trainer weight at a time, as `quads.sync.verify_sync` takes it.

    RuntimeError under tensor or expert parallelism, where one rank does not hold whole weights.
    """
    for site, slot in slots(model).items():
        layer: Any = slot.layer
        method = layer.quant_method
        if getattr(layer, "tp_size", 1) > 1 or (slot.expert and (layer.use_ep or layer.moe_config.tp_size > 1)):
            raise RuntimeError(f"{site} is sharded: compare engine weights with tensor_parallel_size=1")
        codes, scales, outer = (layer._parameters[slot.name + suffix].data for suffix in _STORED)
        if not slot.expert:
            index = method.sites.index(site)
            codes, scales = (part.split(method.rows, dim=0)[index] for part in (codes, scales))
        yield PackedWeight(site, codes, scales, outer, layer._parameters[slot.name].dtype)


def checksums(update: Iterable[PackedWeight]) -> dict[str, str]:
    """sha256 of the bytes of each packed weight: sender and receiver compare them."""
    result = {}
    for weight in update:
        digest = hashlib.sha256()
        for tensor in (weight.packed, weight.scales, weight.outer):
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        result[weight.name] = digest.hexdigest()
    return result
