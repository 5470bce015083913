"""Packed codes and scales in and out of an engine's layers, under the trainer's names.

A packed weight is cut for tensor and expert parallelism by vLLM's own weight loaders, which cut codes and block
scales as they cut the weight: along K by whole bytes and whole blocks. They fill a checkpoint-shaped temporary, of one
layer at a time, which then replaces what the layer keeps, in place and in the order in which it keeps it.

Under a zero block scale codes keep their signs and lose their magnitudes, wherever they are stored: the same values,
and the only codes that quads' quantiser writes there, but a foreign quantiser's may come back as others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quads.emulation.quantizers import BLOCK
from quads.integrations.vllm_plugin import weights
from quads.integrations.vllm_plugin.linear import WEIGHT, QuadsLinearMethod
from quads.integrations.vllm_plugin.moe import W2, W13, QuadsMoEMethod
from quads.integrations.vllm_plugin.port import RefitPort
from quads.kernels import prepack
from quads.sync import PackedWeight

_SHARD_IDS: dict[int, tuple[Any, ...]] = {1: (None,), 2: (0, 1), 3: ("q", "k", "v")}
_NAN, _SIGN = 0x7F, 0x80


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
        if isinstance(method, QuadsLinearMethod) and weights.keeps_codes(module, WEIGHT):
            for site, shard in zip(method.sites, _SHARD_IDS[len(method.sites)], strict=True):
                found[site] = _Slot(module, WEIGHT, (shard,), False)
        if isinstance(method, QuadsMoEMethod) and weights.keeps_codes(module, W13):
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
    given: dict[str, PackedWeight] = {}
    for weight in update:
        if weight.name in given:
            raise ValueError(f"packed weight {weight.name} comes twice in one update")
        given[weight.name] = weight
        if weight.name not in known:
            raise ValueError(f"packed weight {weight.name} is not one that this engine keeps packed")
        _check(weight)
        _check_shape(weight, known[weight.name])
    layers = list(_layers(known, given))
    for layer in layers:
        _replace(layer, given)
    for layer in layers:
        _end_rollout(layer.any)


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


def _check_shape(weight: PackedWeight, slot: _Slot) -> None:
    """vLLM's loaders cut too large a weight without a word. A rank knows its own shard and how many there are."""
    layer: Any = slot.layer
    *_, n, k = layer._parameters[slot.name].shape
    ranks = layer.moe_config.tp_size if slot.expert else getattr(layer, "tp_size", 1)
    if not slot.expert:
        n = _rows(slot)[list(layer.quant_method.sites).index(weight.name)]
    given = (weight.packed.shape[-2], 2 * weight.packed.shape[-1])
    if any(size not in {own, own * ranks} for size, own in zip(given, (n, k), strict=True)):
        raise ValueError(f"packed weight {weight.name}: {given[0]} x {given[1]} does not fit the layer's {n} x {k}")


def _rows(slot: _Slot) -> list[int]:
    """Rows of each of a dense layer's parts; of an output head those that are no padding."""
    layer: Any = slot.layer
    method = layer.quant_method
    rows = method.rows if len(method.sites) == len(method.rows) else [sum(method.rows)]
    return [getattr(layer, "org_vocab_size", rows[0])] if len(rows) == 1 else rows


@dataclass(frozen=True, eq=False)
class _Layer:
    """One weight of a layer: the trainer's weights that make it up, and the outer scale that they share."""

    slots: dict[str, _Slot]
    outer: Tensor

    @property
    def any(self) -> _Slot:
        return next(iter(self.slots.values()))


def _layers(known: dict[str, _Slot], given: dict[str, PackedWeight]) -> Iterator[_Layer]:
    """Each layer's weight in `given`; ValueError where the parts of a fused layer disagree or lack one."""
    for slots_of in _by_layer(known):
        names = list(slots_of)
        there = [name for name in names if name in given]
        if not there:
            continue
        if len(there) < len(names):
            missing = next(name for name in names if name not in given)
            raise ValueError(f"packed update holds {there[0]} but not {missing}: they share one layer and outer scale")
        slot, first = slots_of[there[0]], given[there[0]].outer
        for name in there[1:]:
            if not torch.equal(given[name].outer, first):
                raise ValueError(f"packed weights {there[0]} and {name} of one layer have different outer scales")
        yield _Layer(slots_of, _local_outer(slot, there[0], first))


def _by_layer(known: dict[str, _Slot]) -> list[dict[str, _Slot]]:
    layers: dict[tuple[int, str], dict[str, _Slot]] = {}
    for name, slot in known.items():
        layers.setdefault((id(slot.layer), slot.name), {})[name] = slot
    return list(layers.values())


def _local_outer(slot: _Slot, name: str, outer: Tensor) -> Tensor:
    """The outer scale that this rank keeps: [], or [experts, 1, 1] of the experts that live here."""
    layer: Any = slot.layer
    if not slot.expert:
        experts, here = 1, None
    elif layer.expert_map is None:
        experts, here = layer._parameters[slot.name].shape[0], None
    else:
        experts, here = layer.expert_map.numel(), layer.expert_map.to(outer.device) >= 0
    if outer.numel() not in (1, experts):
        raise ValueError(f"packed weight {name}: outer has shape {tuple(outer.shape)}, not one value or {experts}")
    every = outer.reshape(-1, 1, 1).expand(experts, 1, 1) if slot.expert else outer.reshape(())
    return every if here is None else every[here]


def _replace(layer: _Layer, given: Mapping[str, PackedWeight]) -> None:
    """Gather the layer's shard of `given` and write it over what the layer keeps."""
    slot = layer.any
    module: Any = slot.layer
    port, parameter = weights.port_of(module, slot.name), module._parameters[slot.name]
    *rows, k = parameter.shape
    codes = torch.empty((*rows, k // 2), dtype=torch.uint8, device=port.device)
    scales = torch.full((*rows, k // BLOCK), _NAN, dtype=torch.uint8, device=port.device)  # no update holds this code
    for name, part in layer.slots.items():
        _load(port, part, name, "packed", given[name].packed, codes)
        _load(port, part, name, "scales", given[name].scales, scales)
    unwritten = int((scales == _NAN).sum())
    if unwritten:
        raise ValueError(f"packed weight {' + '.join(layer.slots)}: {unwritten} of {scales.numel()} blocks are missing")
    codes = prepack.cleared(codes, scales)
    whole = PackedWeight(slot.name, codes, scales, layer.outer.to(port.device), parameter.dtype)
    weights.rewrite(module, slot.name, whole, module.quant_method.recipe)


def _end_rollout(slot: _Slot) -> None:
    """A static or random selection grows older, as with weights that the layer quantises itself."""
    method: Any = slot.layer.quant_method
    product = method.products[slot.name] if slot.expert else method.product
    product.new_weights(slot.layer)


def _load(port: RefitPort, slot: _Slot, name: str, field: str, tensor: Tensor, target: Tensor) -> None:
    try:
        if slot.expert:
            _load_experts(port, slot, tensor, target)
        else:
            port.load_into(target, tensor.to(target.device), *(s for s in slot.shards if s is not None))
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        shapes = f"{tuple(tensor.shape)} does not fit {tuple(target.shape)}"
        raise ValueError(f"packed weight {name}: {field} of shape {shapes}") from error


def _load_experts(port: RefitPort, slot: _Slot, tensor: Tensor, target: Tensor) -> None:
    for expert, rows in enumerate(tensor):
        for shard, part in zip(slot.shards, rows.chunk(len(slot.shards), dim=0), strict=True):
            port.load_into(target, part.to(target.device), slot.name, shard, expert)


def held(model: nn.Module) -> Iterator[PackedWeight]:
    """What `model` multiplies by, one trainer weight at a time, as `quads.sync.verify_sync` takes it.

    From the kernels' order, which is all that a GPU keeps, each is made when it is asked for.
    RuntimeError under tensor or expert parallelism, where one rank does not hold whole weights.
    """
    for sites in _by_layer(slots(model)):
        name, slot = next(iter(sites.items()))
        layer: Any = slot.layer
        if getattr(layer, "tp_size", 1) > 1 or (slot.expert and (layer.use_ep or layer.moe_config.tp_size > 1)):
            raise RuntimeError(f"{name} is sharded: compare engine weights with tensor_parallel_size=1")
        whole = weights.exported(layer, slot.name)
        rows = [whole.packed.shape[-2]] if slot.expert else _rows(slot)
        unpadded = (t[..., : sum(rows), :].split(rows, dim=-2) for t in (whole.packed, whole.scales))
        parts = zip(sites, *unpadded, strict=True)
        for site, codes, scales in parts:
            yield PackedWeight(site, codes, scales, whole.outer, whole.dtype)


def checksums(update: Iterable[PackedWeight]) -> dict[str, str]:
    """sha256 of the bytes of each packed weight: sender and receiver compare them."""
    result = {}
    for weight in update:
        digest = hashlib.sha256()
        for tensor in (weight.packed, weight.scales, weight.outer):
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        result[weight.name] = digest.hexdigest()
    return result
