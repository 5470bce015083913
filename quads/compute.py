"""Compute in bfloat16 over float32 master weights, as trainers in production do, and choose implementations.

    with Arithmetic("bfloat16", TRAINER).on(model):
        logits = model(tokens).logits

bfloat16 *master* weights would swallow the updates of a small learning rate; here the optimiser keeps float32 and every
product sees bfloat16 operands. Quantised weights stay Q(master): only their dequantised values are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from quads import dense_experts


@dataclass(frozen=True)
class Implementation:
    """Which code of transformers computes attention and experts; "" leaves the model's own choice."""

    attention: str = ""
    experts: str = ""


AS_LOADED = Implementation()
# On a GPU the two sides of a comparison run through different code, as a trainer and an engine do: fused attention over
# a cache and batched expert products here, plain attention over whole sequences and one grouped product there.
TRAINER = Implementation("eager", "grouped_mm")
ROLLOUT = Implementation("sdpa", dense_experts.NAME)


@dataclass(frozen=True)
class Arithmetic:
    """How one side of a comparison computes what no recipe quantises."""

    compute: str = "float32"
    implementation: Implementation = AS_LOADED

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Let `model` compute so while the context is open."""
        device = next(model.parameters()).device
        with compute(self.compute, device), implementation(model, self.implementation):
            yield


@contextmanager
def compute(name: str, device: torch.device) -> Iterator[None]:
    """Autocast of products to bfloat16, grouped expert products included; "float32" changes nothing."""
    if name == "float32":
        yield
        return
    with torch.autocast(device.type, dtype=torch.bfloat16), _GroupedMmAutocast():
        yield


@contextmanager
def implementation(model: nn.Module, chosen: Implementation) -> Iterator[None]:
    """Let `model` compute attention and experts as `chosen` says while the context is open."""
    config: Any = model.config
    dense_experts.register()
    wanted = {"_attn_implementation": chosen.attention, "_experts_implementation": chosen.experts}
    saved = {name: getattr(config, name, None) for name, value in wanted.items() if value}
    for name in saved:
        if saved[name] is not None:  # a dense model has no experts to implement
            setattr(config, name, wanted[name])
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is not None:
                setattr(config, name, value)


def product_input(x: torch.Tensor) -> torch.Tensor:
    """`x` as autocast would hand it to a product: quantised products are called before autocast sees them."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if x.is_floating_point() and torch.is_autocast_enabled(kind) else x


def as_written(x: torch.Tensor) -> torch.autocast:
    """A context without autocast: a product computes in the precision that it says, FP32 sums included."""
    return torch.autocast(x.device.type, enabled=False)


class _GroupedMmAutocast(TorchFunctionMode):
    """Autocast does not know `grouped_mm` (pytorch #174763): cast its operands as it casts those of `mm`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GROUPED and len(args) >= 2 and type(args[1]) in (torch.Tensor, nn.Parameter):
            args = (product_input(args[0]), product_input(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


_GROUPED = {f for f in (getattr(F, "grouped_mm", None), torch._grouped_mm) if f is not None}
