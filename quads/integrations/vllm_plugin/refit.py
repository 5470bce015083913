"""Replace an engine's weights as one transaction: all of them, in place, or the old ones as they were.

vLLM's layerwise reload rebuilds each layer and copies into its old storages, so CUDA graphs stay valid; but it works
layer by layer, and what fails half-way leaves a mixture. Here the old values are copied aside first (to host memory),
the whole update is checked, and any error puts everything back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_pp_group, get_tp_group
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from quads.integrations.vllm_plugin import packed
from quads.integrations.vllm_plugin.linear import QuadsLinearMethod
from quads.integrations.vllm_plugin.moe import QuadsMoEMethod
from quads.sync import PackedWeight

Update = tuple[str, Tensor] | PackedWeight


class RefitError(ValueError):
    """A refused weight update; the engine goes on with the weights that it had."""


class OtherRankError(RefitError):
    """Another rank of the engine refused the update."""


def check_agreed(*, refused: bool = False) -> None:
    """Called by every rank of an engine at the end of an update: OtherRankError where another one has refused it."""
    flag = torch.tensor(int(refused), device="cpu")
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    if flag and not refused:
        raise OtherRankError("another rank refused the weight update: old weights kept")


class Snapshot:
    """The tensors of a model: which objects they are, and what they held."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._stores = [
            (module, dict(module._parameters), dict(module._buffers), set(module._non_persistent_buffers_set))
            for module in model.modules()
        ]
        tensors = {id(t): t for _, p, b, _ in self._stores for t in (*p.values(), *b.values()) if t is not None}
        self._values = [(t, _aside(t)) for t in tensors.values() if not t.is_meta]

    def restore(self) -> None:
        """Register the same tensor objects again, with the old values in their old storages."""
        for module, parameters, buffers, transient in self._stores:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set = transient
            get_layerwise_info(module).reset()
            for parameter in parameters.values():
                discard = getattr(getattr(parameter, "weight_loader", None), "discard", None)
                if discard is not None:
                    discard()
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.data.copy_(value)
            unwrap_loaders(self.model)
            refresh(self.model)


def _aside(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.data, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor.data)


def apply_update(
    model: nn.Module, model_config: Any, update: Iterable[Update], checksums: Mapping[str, str] | None = None
) -> None:
    """Load full-precision tensors (checkpoint names) and packed weights (trainer names), in any mixture and number.

    checksums: those of the packed weights, from `packed.checksums` at the sender.
    Layers that the update does not name keep their weights. RefitError or ValueError, naming the layer, for a
    fused layer that is only partly there, a name that comes twice, NaN or Inf, a wrong shape or name, or a corrupted
    packed weight.
    """
    before = Snapshot(model)
    load: Any = model.load_weights
    try:
        codes: list[PackedWeight] = []
        biases = dict.fromkeys(f"{site}.bias" for site in packed.slots(model))
        initialize_layerwise_reload(model)
        load(_full_precision(update, codes, biases))
        check_complete(model)
        with _left_alone():
            finalize_layerwise_reload(model, model_config)
        unwrap_loaders(model)
        packed.load(model, codes, checksums)
        if late := [(name, bias) for name, bias in biases.items() if bias is not None]:
            load(late)
        check_finite(model)
        check_agreed()
    except BaseException as error:
        if not isinstance(error, OtherRankError):
            check_agreed(refused=True)
        before.restore()
        if isinstance(error, (KeyError, AttributeError, AssertionError, RuntimeError)):
            raise RefitError(
                f"weight update refused, old weights kept: {str(error) or type(error).__name__}"
            ) from error
        raise


@contextmanager
def _left_alone() -> Iterator[None]:
    """No warning of vLLM's that a layer got no weights: it keeps its own, or gets them packed."""
    logger = logging.getLogger(layerwise.__name__)

    def about_loaded_layers(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in record.msg

    logger.addFilter(about_loaded_layers)
    try:
        yield
    finally:
        logger.removeFilter(about_loaded_layers)


def unwrap_loaders(model: nn.Module) -> None:
    """Give biases their own loaders back.

    vLLM's reload never moves a bias to the meta device: it wraps the loader of the very parameter, and leaves it so
    where the layer got no weights. A bias that is then loaded by itself would be dropped without a word.
    """
    for parameter in model.parameters():
        while getattr(getattr(parameter, "weight_loader", None), "__name__", "") == "online_process_loader":
            parameter.weight_loader = parameter.weight_loader.__wrapped__  # type: ignore[attr-defined]


def refresh(model: nn.Module) -> None:
    """Have every layer derive again what it keeps beside its codes; its list of blocks may be younger than they are."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, (QuadsLinearMethod, QuadsMoEMethod)):
            method.refresh(module)


def _full_precision(
    update: Iterable[Update], codes: list[PackedWeight], biases: dict[str, Tensor | None]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `update` for vLLM's layerwise reload; what it cannot take is put aside.

    codes: packed weights. biases: what comes under a name in it, where the layer's weight is packed: the reload would
    wait for the weight.
    """
    seen = set()
    for item in update:
        if isinstance(item, PackedWeight):
            codes.append(item)
            continue
        name, tensor = _pair(item)
        if name in seen:
            raise RefitError(f"weight update holds {name} twice")  # vLLM would count it for a shard that is missing
        seen.add(name)
        if name in biases:
            biases[name] = tensor
        else:
            yield name, tensor
    packed_layers = {weight.name for weight in codes}
    for name, bias in biases.items():
        if bias is not None and name.removesuffix(".bias") not in packed_layers:
            biases[name] = None
            yield name, bias


def _pair(item: object) -> tuple[str, Tensor]:
    match item:
        case (str() as name, Tensor() as tensor):
            return name, tensor
    raise RefitError(f"weight update holds a {type(item).__name__}, neither (name, tensor) nor a PackedWeight")


def check_complete(model: nn.Module) -> None:
    """RefitError where an update holds some shards of a layer and not the others (before vLLM finalises it)."""
    for name, module in model.named_modules():
        if not isinstance(module, (LinearBase, RoutedExperts)):
            continue
        info = get_layerwise_info(module)
        total = info.load_numel_total
        if total is not None and 0 < info.load_numel < total:
            raise RefitError(
                f"weight update holds {info.load_numel} of the {total} elements of {name}: send all of them"
            )


def check_finite(model: nn.Module) -> None:
    """RefitError names the first parameter that holds NaN or Inf."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not parameter.is_meta and not bool(parameter.isfinite().all()):
            raise RefitError(f"weight update gives {name} NaN or Inf: old weights kept")
