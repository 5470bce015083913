"""Rollout routing replay (R3): record which experts the rollout chose, make the trainer choose the same.

Only the choice is replaced: a router's own code computes its weights from its own logits at the recorded experts, so a
model that replays its own routing computes the same bits, and gradients reach the router as before.
Source: rollout routing replay, arXiv 2510.11370, as summarised by third parties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Routing = dict[str, Tensor]  # router name -> expert indices int64 [B, T, k]
UNRECORDED = -1


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """The routers of `model`: modules with `top_k`, `num_experts` and a weight [num_experts, hidden]."""
    found = {}
    for name, module in model.named_modules():
        experts = getattr(module, "num_experts", None)
        weight = module._parameters.get("weight")
        if experts and hasattr(module, "top_k") and weight is not None and weight.shape[0] == experts:
            found[name] = module
    return found


class RoutingRecorder:
    """Choices of every router, call after call."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Tensor]] = {}

    def add(self, name: str, chosen: Tensor) -> None:
        self._calls.setdefault(name, []).append(chosen.detach())

    def take(self, batch: int) -> Routing:
        """`routing(batch)` of the calls since the last take, which are forgotten."""
        taken = self.routing(batch)
        self._calls.clear()
        return taken

    def routing(self, batch: int) -> Routing:
        """All calls so far as [batch, T, k]: a prefill and decode steps of one batch join along T."""
        return {
            name: torch.cat([call.reshape(batch, -1, call.shape[-1]) for call in calls], dim=1)
            for name, calls in self._calls.items()
        }


class SampledRouting:
    """Choices of a sampling run whose rows leave the batch as they end, laid out as a trainer pads: prompts left.

    `choices`: int16 [rows, width, routers, k] in the order of `routers(model)`; UNRECORDED at padding, and at the last
    token of each row, which the rollout never fed to the model.
    """

    def __init__(self, recorder: RoutingRecorder, model: nn.Module, width: int) -> None:
        self._recorder, self._names, self._width = recorder, list(routers(model)), width
        self.choices = torch.empty(0)

    def prefill(self, mask: Tensor, samples: int) -> None:
        """Take the prefill of prompts padded as `mask` [prompts, T] says, shared by `samples` rows each."""
        chosen = self._take(len(mask)).masked_fill(~mask.bool()[..., None, None], UNRECORDED)
        prompts, length, layers, k = chosen.shape
        self.choices = chosen.new_full((prompts * samples, self._width, layers, k), UNRECORDED)
        self.choices[:, :length] = chosen.repeat_interleave(samples, 0)

    def decode(self, rows: Tensor, column: int) -> None:
        """Take a decode step of `rows`, whose tokens stand at `column` of the layout."""
        self.choices[rows, column] = self._take(len(rows))[:, 0]

    def _take(self, batch: int) -> Tensor:
        taken = self._recorder.take(batch)
        return torch.stack([taken[name] for name in self._names], dim=2).to(torch.int16)


def as_routing(model: nn.Module, choices: Tensor) -> Routing:
    """Rows of `SampledRouting.choices` [B, T, routers, k] as `replay_routing` takes them."""
    return {name: choices[:, :, layer].long() for layer, name in enumerate(routers(model))}


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecorder]:
    """Record the experts that each token is sent to while the context is open (opened outside a replay, its choice)."""
    recorder = RoutingRecorder()

    def observe(name: str, module: Any) -> Callable[[Tensor], Tensor]:
        def chosen(own: Tensor) -> Tensor:
            recorder.add(name, own)
            return own

        return chosen

    with _choosing(model, observe):
        yield recorder


@contextmanager
def replay_routing(model: nn.Module, routing: Routing) -> Iterator[None]:
    """Send each token [B, T] of every forward pass to its recorded experts; a negative record leaves its own choice.

    ValueError where a router was not recorded or a call has another number of tokens than the record.
    """
    missing = sorted(set(routers(model)) - set(routing))
    if missing:
        raise ValueError(f"routing holds no record of router {missing[0]} ({len(missing)} are missing)")

    def replace(name: str, module: Any) -> Callable[[Tensor], Tensor]:
        recorded = routing[name].flatten(0, -2)

        def chosen(own: Tensor) -> Tensor:
            if own.shape != recorded.shape:
                raise ValueError(f"router {name} chose for {tuple(own.shape)}, the record is {tuple(recorded.shape)}")
            found = recorded.to(own)
            return torch.where(found < 0, own, found)

        return chosen

    with _choosing(model, replace):
        yield


@contextmanager
def _choosing(model: nn.Module, choice: Callable[[str, Any], Callable[[Tensor], Tensor]]) -> Iterator[None]:
    found = routers(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no router: routing can be replayed in a mixture of experts only")
    outer = {name: module.__dict__.get("forward") for name, module in found.items()}
    for name, module in found.items():
        module.forward = _with_choice(module, choice(name, module))  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, module in found.items():
            module.__dict__.pop("forward")
            if outer[name] is not None:
                module.__dict__["forward"] = outer[name]


def _with_choice(module: Any, chosen: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Choice(module.num_experts, module.top_k, chosen):
            return original(*args, **kwargs)

    return forward


class _Choice(TorchFunctionMode):
    """Answers the top-k over experts (2-D, one row a token) with the chosen indices and the values found there."""

    def __init__(self, experts: int, top_k: int, chosen: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.experts, self.top_k, self.chosen = experts, top_k, chosen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].ndim != 2 or args[0].shape[-1] != self.experts:
            return result
        indices = self.chosen(result.indices)
        return torch.return_types.topk((args[0].gather(-1, indices), indices))
