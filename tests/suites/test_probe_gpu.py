"""On a GPU the probe's arms run through the kernels: each product within its derived bound of the emulator's."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from quads.attribution.batch import TokenBatch
from quads.compensation import BlockSelector
from quads.emulation import quantizers
from quads.rollout import Nvfp4Product
from quads.suites.probe_measure import Tokens
from quads.suites.probe_numerics import arm
from quads.suites.probe_scoring import Scored, prefill
from tests.quads.tiny import tiny_model, tokens

ARMS = ["nvfp4", "quads", "quads-random", "quads-full", "quads:rac_scope=token", "quads:rac_scope=tile"]


def scored(name: str, device: str, model: Any) -> Scored:
    ids = tokens(64, 24).to(device)
    real = torch.ones_like(ids, dtype=torch.bool)
    batch = TokenBatch(ids, real, real[:, 1:])
    return Tokens(copy.deepcopy(model).to(device), batch, batch, prefill, "bfloat16", 0).score(arm(name))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARMS)
def test_every_product_is_within_the_accumulation_bound_of_the_emulator(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quads.kernel_product import KernelProduct

    within: list[bool] = []
    original = KernelProduct.grouped_matmul

    def compared(self: KernelProduct, x: Tensor, ends: Tensor) -> Tensor:
        y, selector = original(self, x, ends), self.selector  # whose list the end of the rollout may draw anew
        packed, rows, at = self._weight, x.cpu(), ends.cpu()
        weight = quantizers.NVFP4Tensor(*(t.cpu() for t in (packed.quantized.codes, packed.scales, packed.outer)))
        emulated = Nvfp4Product(weight, selector.recipe, _on_cpu(selector), self.name).grouped_matmul(rows, at)
        within.append(within_bound(emulated, y.cpu(), rows, at, weight))
        return y

    monkeypatch.setattr(KernelProduct, "grouped_matmul", compared)
    scored(name, "cuda", tiny_model())
    assert within == [True] * 4  # gate_up and down of two layers


def _on_cpu(selector: BlockSelector) -> BlockSelector:
    """A copy whose list, if it has been made, lies in the emulator's memory."""
    copied = copy.copy(selector)
    copied._kept = None if selector._kept is None else selector._kept.cpu()
    return copied


def test_the_bound_allows_one_ulp_and_notices_three_lost_columns_and_a_wrong_expert() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = quantizers.quantize(torch.randn(3, 48, 128, generator=generator), torch.full((3, 1, 1), 1e-3))
    x, ends = torch.randn(60, 128, generator=generator).bfloat16(), torch.tensor([20, 20, 60], dtype=torch.int32)
    naive, full = (_emulated(name, x, ends, weight) for name in ("nvfp4", "quads-full"))
    value = quantizers.dequantize(weight)
    q = quantizers.dequantize(quantizers.quantize(x, granularity="token"))
    other = torch.cat([q[:20] @ value[0].T, q[20:] @ value[2].T]).bfloat16()
    assert within_bound(naive, other, x, ends, weight)
    assert not within_bound(naive, full, x, ends, weight)
    bits = naive.view(torch.int16)
    assert within_bound(naive, (bits + 1).view(torch.bfloat16), x, ends, weight)
    assert not within_bound(naive, (bits + 3).view(torch.bfloat16), x, ends, weight)
    assert not within_bound(naive, _emulated("nvfp4", x, torch.tensor([20, 21, 60]), weight), x, ends, weight)


def _emulated(name: str, x: Tensor, ends: Tensor, weight: quantizers.NVFP4Tensor) -> Tensor:
    recipe = arm(name).recipe
    return Nvfp4Product(weight, recipe, BlockSelector(recipe, x.shape[1], 0), "w").grouped_matmul(x, ends)


def within_bound(ours: Tensor, theirs: Tensor, x: Tensor, ends: Tensor, weight: quantizers.NVFP4Tensor) -> bool:
    return bool(((ours.float() - theirs.float()).abs() <= _bound(x, ends, weight, ours.float())).all())


def _bound(x: Tensor, ends: Tensor, weight: quantizers.NVFP4Tensor, y: Tensor) -> Tensor:
    """|difference| of two FP32 sums of the same terms in other orders, each then rounded once to bfloat16.

    A sum of n terms is within n 2^-24 (round to nearest) or n 2^-23 (toward zero) of the sum of their magnitudes, which
    Cauchy and Schwarz hold below |a| |b| of the operands' norms; n <= 2K with the residual's columns, and the norm of
    [Q(x), Q(r)] is below 2 |x| (a residual is at most x in magnitude, and so is its quantised value up to half a step).
    """
    value = quantizers.dequantize(weight)
    experts = torch.searchsorted(ends, torch.arange(len(x), dtype=torch.int32), right=True).clamp_max(len(value) - 1)
    norms = 2 * x.float().norm(dim=-1, keepdim=True) * value.norm(dim=-1)[experts] * math.sqrt(2)
    return 2 * 2 * x.shape[1] * 2.0**-23 * norms + y.abs() * 2.0**-7


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "fp8", "w4a16", "w16a4", *ARMS])
def test_log_probabilities_are_those_of_the_cpu_but_for_the_engines_difference(name: str) -> None:
    """No bound holds through layers of rounding: the difference must be a small part of what quantisation moves."""
    model = tiny_model()
    gpu, cpu = (scored(name, device, model) for device in ("cuda", "cpu"))
    moved = scored("nvfp4", "cpu", model).logps - scored("bf16", "cpu", model).logps
    difference = (gpu.logps.cpu() - cpu.logps).abs().mean()
    assert difference < 0.75 * moved.abs().mean(), (name, float(difference), float(moved.abs().mean()))
