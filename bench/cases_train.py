"""What QUADS costs a trainer: a training step with fake-quantised weights, and the refit that hands weights over.

Refit: quantise, pack and write one layer's experts at a time into storage that a rollout holds; a bfloat16 rollout's
refit, a copy of every weight, is its peer. Step: forward, backward and fused AdamW of a Qwen3-MoE, plain and prepared
(two copies of one start). Before either is timed, every weight is compared bit for bit with what the trainer sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from quads import recipes
from quads.bench.cases import Case, Goal, Group, Ready
from quads.bench.counts import BYTES
from quads.qat import prepare_qat
from quads.sync import export_weights, verify_sync

QUADS = recipes.named()["quads"]
STEP_SECONDS = 3.0


@dataclass(frozen=True)
class Layers:
    """Expert tensors of some decoder layers; the default shape is Qwen3-30B-A3B's."""

    layers: int
    experts: int = 128
    hidden: int = 2048
    inner: int = 768

    def shape(self) -> dict[str, int]:
        return {"layers": self.layers, "experts": self.experts, "hidden": self.hidden, "inner": self.inner}

    @property
    def elements(self) -> int:
        return self.layers * self.experts * self.hidden * self.inner * 3


@dataclass(frozen=True)
class Step:
    """A Qwen3-MoE and the tokens of a step; the default model has 0.93 B parameters."""

    tokens: int
    layers: int = 12
    hidden: int = 1024
    experts: int = 32
    inner: int = 704
    length: int = 1024
    vocabulary: int = 32000

    def shape(self) -> dict[str, int]:
        return {"tokens": self.tokens, "layers": self.layers, "hidden": self.hidden, "experts": self.experts}


REFITS = {
    "cuda": (Layers(8), Layers(1), Layers(4), Layers(8, 32), Layers(4, 16, 7168, 2048)),
    "cpu": (Layers(1, 8, 512, 128), Layers(4, 8, 512, 128), Layers(1, 32, 512, 128), Layers(1, 8, 1024, 256)),
}
STEPS = {
    "cuda": (Step(65536), Step(16384), Step(32768), Step(16384, layers=4), Step(16384, experts=8)),
    "cpu": (
        Step(256, 2, 128, 8, 64, 64, 512),
        Step(1024, 2, 128, 8, 64, 64, 512),
        Step(256, 4, 128, 8, 64, 64, 512),
        Step(256, 2, 256, 8, 128, 64, 512),
    ),
}


def groups(device: str) -> Iterator[Group]:
    """Refits by layers, experts and model size; steps by tokens, layers and experts."""
    for at, refit in enumerate(REFITS[device]):
        yield Group(
            op="refit", shape=refit.shape(), device=device, quick=at == 0, cases=REFIT_CASES[device],
            inputs=partial(_layers, refit, device),
        )  # fmt: skip
    for at, step in enumerate(STEPS[device]):
        yield Group(
            op="train_step", shape=step.shape(), device=device, quick=at == 0, cases=STEP_CASES[device],
            inputs=partial(_TwoModels, step, device), seconds=STEP_SECONDS,
        )  # fmt: skip


class Experts(nn.Module):
    """One layer's expert tensors under names that recipes select."""

    def __init__(self, size: Layers, seed: int, device: str) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(seed)
        shapes = {"gate_up_proj": (2 * size.inner, size.hidden), "down_proj": (size.hidden, size.inner)}
        for name, shape in shapes.items():
            drawn = torch.randn(size.experts, *shape, generator=generator, device=device, dtype=torch.bfloat16)
            self.register_parameter(name, nn.Parameter(drawn * 0.02))


def _layers(size: Layers, device: str) -> nn.Module:
    return nn.ModuleDict({str(i): nn.ModuleDict({"experts": Experts(size, i, device)}) for i in range(size.layers)})


def _refit(model: nn.Module) -> Ready:
    held = {w.name: w for w in export_weights(model, QUADS)}

    def hand_over() -> None:
        for _ in export_weights(model, QUADS, into=held):
            pass

    def check() -> float:
        hand_over()
        return 0.0 if verify_sync(model, QUADS, held.values()) == len(held) else float("inf")

    return Ready(calls=[hand_over], bytes=_elements(model) * (2 + BYTES["nvfp4"]), check=check, graph=False)


@torch.no_grad()
def _copy(model: nn.Module) -> Ready:
    held = [torch.empty_like(p) for p in model.parameters()]

    def hand_over() -> None:
        for target, source in zip(held, model.parameters(), strict=True):
            target.copy_(source.detach())

    return Ready(calls=[hand_over], bytes=_elements(model) * 4.0, graph=False)


def _elements(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


class _TwoModels:
    """A plain and a prepared copy of one random model, each with its optimizer, made when first asked for."""

    def __init__(self, size: Step, device: str) -> None:
        self.size, self.device = size, device
        shape = (size.tokens // size.length, size.length)
        self.ids = torch.randint(0, size.vocabulary, shape, device=device)

    def model(self) -> nn.Module:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        s, heads = self.size, max(2, self.size.hidden // 64)
        config = Qwen3MoeConfig(
            vocab_size=s.vocabulary, hidden_size=s.hidden, num_hidden_layers=s.layers, num_attention_heads=heads,
            head_dim=64, num_key_value_heads=max(1, heads // 4), intermediate_size=2 * s.hidden, num_experts=s.experts,
            num_experts_per_tok=4, moe_intermediate_size=s.inner, tie_word_embeddings=False,
            max_position_embeddings=4096,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(self.device):
            return Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16).train()

    def step(self, model: nn.Module) -> Callable[[], None]:
        """One step, warmed up."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def call() -> None:
            model(self.ids, labels=self.ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        for _ in range(3):
            call()
        return call

    def flops(self, model: nn.Module) -> float:
        """Six a parameter that takes part and token (embedding lookups and attention's scores left out)."""
        total, s = _elements(model), self.size
        idle = s.layers * (s.experts - 4) * 3 * s.hidden * s.inner + s.vocabulary * s.hidden
        return 6.0 * (total - idle) * s.tokens


def _step(prepared: bool, models: _TwoModels) -> Ready:
    model = models.model()
    check = None
    if prepared:
        prepare_qat(model, QUADS)
        check = partial(_in_sync, model)
    return Ready(
        calls=[models.step(model)], bytes=0.0, flops=models.flops(model), check=check, graph=False,
        peak="bf16" if models.device == "cuda" else "", in_a_row=False,
    )  # fmt: skip


def _in_sync(model: nn.Module) -> float:
    verify_sync(model, QUADS, export_weights(model, QUADS))
    return 0.0


_HALF_OF_COPY = Goal(text=">= 50 % of copy", of="share_of_copy", at_least=0.5)
_CHEAP = Goal(text="QAT / plain <= 1.05", at_most=1.05)
REFIT_CASES = {
    device: (
        Case(numerics="nvfp4", implementation="quads.sync", ready=_refit, goal=goal),
        Case(numerics="bf16", implementation="torch.copy", ready=_copy),
    )
    for device, goal in (("cuda", _HALF_OF_COPY), ("cpu", None))
}
STEP_CASES = {
    device: (
        Case(numerics="bf16", implementation="transformers", ready=partial(_step, False)),
        Case(numerics="quads", implementation="quads.qat", ready=partial(_step, True), goal=goal),
    )
    for device, goal in (("cuda", _CHEAP), ("cpu", None))
}
