"""The float64 layer that timed layers are held to is the emulator's layer, and a planted fault is beyond its bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quads.bench import cases_moe
from quads.bench.cases_moe import BOUND, PROMPTS, Inputs, Size
from quads.emulation import layout, moe, quantizers
from quads.emulation.quantizers import NVFP4Tensor
from quads.kernels.quantize import PackedNVFP4

SIZE = Size(6, hidden=64, inner=32, experts=4, top_k=2)


def inputs() -> Inputs:
    torch.manual_seed(0)
    w13, w2 = (cases_moe.experts_weight(4, *shape, device="cpu") for shape in ((64, 64, 2), (64, 32, 1)))
    ids = torch.rand(6, 4).argsort(1)[:, :2].int()
    routes = [(ids, torch.softmax(torch.randn(6, 2), -1))]
    prepared: Any = None
    return Inputs(SIZE, torch.randn(6, 64).bfloat16(), routes, w13, w2, prepared)


def by_token(x: Tensor) -> tuple[PackedNVFP4, None]:
    q = quantizers.quantize(x, granularity="token")
    return PackedNVFP4(q.packed, q.scales, q.outer), None


def matrix(w: PackedNVFP4, expert: int, rows: slice, outer: Tensor) -> NVFP4Tensor:
    return NVFP4Tensor(layout.unpack(w.packed[expert][rows]), w.scales[expert][rows], outer)


def emulated(i: Inputs) -> Tensor:
    experts = [
        moe.Expert(
            matrix(i.w13, e, slice(0, 32), i.w13.outer[e, 0]), matrix(i.w13, e, slice(32, 64), i.w13.outer[e, 1]),
            matrix(i.w2, e, slice(None), i.w2.outer[e]),
        )
        for e in range(4)
    ]  # fmt: skip
    ids, weights = i.routes[0]
    return moe.layer(i.x, ids.long(), weights, experts)


def test_prompts_are_timed_beside_every_peer() -> None:
    few, *prompts = (g for g in cases_moe.groups("cuda") if g.shape["tokens"] in (1, *PROMPTS))
    assert [g.shape["tokens"] for g in prompts] == [2048, 8192]
    assert all([c.implementation for c in g.cases] == [c.implementation for c in few.cases] for g in prompts)


def test_a_layers_flops_and_bytes_are_those_of_its_tokens_and_of_the_experts_they_use() -> None:
    i = inputs()
    ready = cases_moe._ready(i, lambda *_: None, "nvfp4", "nvfp4", "bf16", 0.5)
    used = len(i.routes[0][0].unique())
    assert ready.flops == 1.5 * 2 * (6 * 2) * 3 * 64 * 32  # 12 pairs, three products of 64 x 32
    assert ready.bytes == used * 3 * 64 * 32 * 0.5625 + 6 * 64 * 4


def test_the_reference_is_the_emulators_layer() -> None:
    i = inputs()
    i = replace(i, w13=replace(i.w13, outer=i.w13.outer * torch.tensor([1.0, 0.37])))
    assert cases_moe.error(i, lambda *_: emulated(i), by_token, BOUND) < 1


def test_an_expert_with_another_outer_scale_is_beyond_the_bound() -> None:
    i = inputs()
    wrong = replace(i, w2=replace(i.w2, outer=i.w2.outer * torch.tensor([1.0, 1.0, 1.02, 1.0])))
    assert cases_moe.error(i, lambda *_: emulated(wrong), by_token, BOUND) > 1


def test_activations_that_are_not_quantised_are_beyond_the_bound() -> None:
    i = inputs()
    assert cases_moe.error(i, lambda *_: cases_moe.reference(i, None), by_token, BOUND) > 1
