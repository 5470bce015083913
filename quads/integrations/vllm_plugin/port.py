"""A parameter without storage that takes a checkpoint's shards again, for callers that load straight into the model.

vLLM's own reload restores the checkpoint-shaped parameter first. TRL's colocated engine does not: it calls
`model.load_weights` at every step. The port gives it a parameter of the checkpoint's shape whose weight loader
collects the shards of the layer, and hands the whole weight over when the last one has come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode


class RefitPort:
    """The weight loader of one replaced parameter.

    `template` is the parameter as the layer created it (shape, dtype and loader attributes); `commit(weight)`
    quantises a complete weight and writes it in place, or raises and leaves the old one.
    """

    __name__ = "refit_port"
    supports_moe_loading = True

    def __init__(self, layer: str, template: Parameter, commit: Callable[[Tensor], None]) -> None:
        self.layer, self._commit = layer, commit
        self._shape, self._dtype, self.device = template.shape, template.dtype, template.device
        self._attributes = {k: v for k, v in template.__dict__.items() if k != "weight_loader"}
        self._loader: Callable[..., Any] = template.weight_loader  # type: ignore[attr-defined]
        self._stage: Parameter | None = None
        self._seen: dict[object, int] = {}

    def parameter(self) -> Parameter:
        """The parameter to register: on the meta device, so it costs nothing and no storage can go stale."""
        return self._dress(torch.empty(self._shape, dtype=self._dtype, device="meta"), weight_loader=self)

    def __call__(self, param: Parameter, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._stage is None:
            self._stage = self._dress(torch.empty(self._shape, dtype=self._dtype, device=self.device))
        with _CopiedElements() as copied:
            result = self._loader(self._stage, loaded_weight, *args, **kwargs)
        self._seen[(args, tuple(sorted(kwargs.items())))] = copied.count
        if sum(self._seen.values()) >= self._stage.numel():
            weight = self._stage.data
            self.discard()
            self._commit(weight)
        return result

    def load_into(self, storage: Tensor, loaded_weight: Tensor, *args: Any) -> None:
        """Cut `loaded_weight` as the layer's loader cuts weights, and write it into `storage`."""
        self._loader(self._dress(storage), loaded_weight, *args)

    def discard(self) -> None:
        """Forget the shards that have come so far."""
        self._stage, self._seen = None, {}

    def check_complete(self) -> None:
        """Raise RuntimeError where a refit stopped in the middle of this layer's weight."""
        if self._stage is not None:
            have = sum(self._seen.values())
            raise RuntimeError(
                f"refit of {self.layer} is incomplete: {have} of {self._stage.numel()} weights have come; send the rest"
            )

    def _dress(self, data: Tensor, **extra: Any) -> Parameter:
        parameter = Parameter(data, requires_grad=False)
        parameter.__dict__.update(self._attributes, **extra)
        return parameter


class _CopiedElements(TorchDispatchMode):
    """Counts the elements that weight loaders write, whatever way they cut and narrow, the zeros of padding too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar):
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))
