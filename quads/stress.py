"""Outlier stress: outlier channels in front of the quantiser, while the model's BF16 function stays bit-identical.

In every decoder layer a few channels c of a norm's weight are multiplied by 2^e and the columns c of every weight that
multiplies that norm's output by 2^-e. Scaling by a power of two commutes with rounding as long as nothing leaves the
normal range, so every product x_c * w_c is the same number as before and so is every sum, in whatever order a machine
adds: the function does not change by one bit. What a 16-block quantiser sees does: x_c is 2^e times its neighbours.
Weights see the opposite: a column 2^e below its block loses its bits in Q(W), which `weights` figures then show.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quads.attribution.layerwise import decoder_layers
from quads.emulation.quantizers import BLOCK

# norm -> the sub-module that reads it, the leaves of it that multiply the norm's output, and those that do not.
_READERS = {
    "input_layernorm": ("self_attn", {"q_proj", "k_proj", "v_proj"}, {"o_proj", "q_norm", "k_norm"}),
    "post_attention_layernorm": (
        "mlp",
        {"gate_proj", "up_proj", "gate_up_proj", "gate", "shared_expert_gate"},
        {"down_proj"},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Stress:
    """`channels` outlier channels, each in a 16-block of its own, the same in every layer (drawn from `seed`).

    exponents: channel i is scaled by 2^exponents[i % len]; (2, 3, 4, 5) gives x4, x8, x16, x32 in turn.
    """

    channels: int = 8
    exponents: tuple[int, ...] = (2, 3, 4, 5)
    seed: int = 0

    def scales(self, hidden: int) -> Tensor:
        """Scale of every channel, float32 [hidden]; ValueError where the blocks do not suffice."""
        blocks = hidden // BLOCK
        if not 1 <= self.channels <= blocks:
            raise ValueError(
                f"channels is {self.channels}: a hidden size of {hidden} has {blocks} blocks, one channel each"
            )
        if not self.exponents:
            raise ValueError("exponents is empty: it must say how far outliers stand out")
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(blocks, generator=generator)[: self.channels] * BLOCK
        chosen += torch.randint(BLOCK, (self.channels,), generator=generator)
        exponent = torch.tensor([self.exponents[i % len(self.exponents)] for i in range(self.channels)])
        return torch.ones(hidden).index_put_((chosen,), torch.ldexp(torch.ones(self.channels), exponent))


def parse(text: str) -> Stress:
    """ "16x8" as 16 channels of scale 8; ValueError for anything but CHANNELSxSCALE with a scale of 4, 8, 16 or 32."""
    found = re.fullmatch(r"(\d+)x(4|8|16|32)", text)
    if found is None:
        raise ValueError(f"outliers {text!r} is not CHANNELSxSCALE with a scale of 4, 8, 16 or 32")
    return Stress(channels=int(found[1]), exponents=(int(found[2]).bit_length() - 1,))


@torch.no_grad()
def add_outliers(model: nn.Module, stress: Stress) -> Tensor:
    """Stress `model` in place; returns the scale of every channel, float32 [hidden].

    ValueError names a norm or weight whose family is not known here, or a weight that a power of two would push out
    of its dtype's normal range; the model is then as it was found.
    """
    config: Any = model.config
    scales = stress.scales(config.hidden_size)
    changes = [change for index, layer in enumerate(decoder_layers(model)) for change in _changes(index, layer, scales)]
    for name, parameter, factor in changes:
        scaled = parameter * factor.to(parameter.dtype)
        if not torch.equal(scaled / factor.to(parameter.dtype), parameter) or not bool(scaled.isfinite().all()):
            raise ValueError(f"{name} cannot be scaled by a power of two without loss: use smaller exponents")
    for _, parameter, factor in changes:
        parameter.mul_(factor.to(parameter.dtype))
    return scales


def _changes(index: int, layer: nn.Module, scales: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """(name, parameter, factor that multiplies it) of one decoder layer."""
    changes = []
    for norm_name, (reader, follows, apart) in _READERS.items():
        norm, module = getattr(layer, norm_name, None), getattr(layer, reader, None)
        if norm is None or module is None:
            raise ValueError(f"layer {index} has no {norm_name} followed by {reader}: its family is not known here")
        _check_norm(f"layer {index} {norm_name}", norm, scales)
        changes.append((f"layer {index} {norm_name}", norm.weight, scales))
        for name, parameter in module.named_parameters():
            leaf = name.removesuffix(".weight").rpartition(".")[2]
            if leaf in follows and parameter.shape[-1] == len(scales):
                changes.append((f"layer {index} {reader}.{name}", parameter, 1 / scales))
            elif leaf not in apart and not name.endswith("bias"):
                raise ValueError(f"layer {index} {reader}.{name}: not known whether it multiplies {norm_name}'s output")
    return changes


def _check_norm(name: str, norm: Any, scales: Tensor) -> None:
    """Scaling the norm's weight must scale its output: not so where a family adds one to the weight."""
    x = torch.linspace(-2, 2, len(scales)).to(norm.weight.dtype)
    before, kept = norm(x), norm.weight.clone()
    norm.weight.mul_(scales.to(kept.dtype))
    after = norm(x)
    norm.weight.copy_(kept)
    if not torch.equal(after, before * scales.to(before.dtype)):
        raise ValueError(f"{name}: {type(norm).__name__} does not multiply by its weight")
