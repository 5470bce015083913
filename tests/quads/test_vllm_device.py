"""The GPU side of the plugin's layers, run by Triton's interpreter: the bits of the rollout's products."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quads import qdq, recipes
from quads.compensation import BlockSelector
from quads.kernels import support
from quads.recipes import Recipe
from quads.rollout import Nvfp4Product

interpreted = pytest.mark.skipif(not support.interpreting(), reason="runs in the interpreter's own process, below")
K, N, M, EXPERTS, INNER = 96, 48, 7, 3, 32
SCOPES = {"none": 0.0, "batch": 0.5, "token": 0.5, "static": 0.5, "random": 0.5, "all": 1.0}


def recipe_of(scope: str) -> Recipe:
    return recipes.load("quads").replace(rac_ratio=SCOPES[scope], rac_scope="batch" if scope == "none" else scope)


def inputs() -> Tensor:
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:, 3] *= 20
    return x


def pack(shape: tuple[int, ...], recipe: Recipe, seed: int) -> qdq.PackedWeight:
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05).bfloat16()
    amax = weight.abs().amax(dim=(-2, -1), keepdim=weight.ndim > 2).float()
    return qdq.pack(weight, recipe, qdq.outer_from_amax(amax, recipe))


@interpreted
@pytest.mark.parametrize("scope", list(SCOPES))
def test_a_dense_layer_gives_the_bits_of_the_emulated_product(scope: str) -> None:
    from quads.integrations.vllm_plugin import device
    from quads.kernels import gemm

    recipe, x = recipe_of(scope), inputs()
    weight = pack((N, K), recipe, 1)
    wanted = Nvfp4Product(weight.quantized, recipe, BlockSelector(recipe, K, 3), "w").matmul(x)
    rows = device.Activations(recipe, K, 3, x.device)
    assert torch.equal(device.matmul(x, gemm.prepare_weight(weight), rows, calibrate=True), wanted)


@interpreted
@pytest.mark.parametrize("scope", ["none", "batch", "token"])
def test_fused_experts_differ_from_the_emulated_products_by_one_rounding_of_silu(scope: str) -> None:
    """The kernels round silu(gate) * up once, transformers twice: one bfloat16 step of h, 2^-8, in the products."""
    from quads.integrations.vllm_plugin import device
    from quads.kernels import gemm

    recipe, x = recipe_of(scope), inputs()
    w13, w2 = pack((EXPERTS, 2 * INNER, K), recipe, 1), pack((EXPERTS, K, INNER), recipe, 2)
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 1], [1, 0], [2, 1], [0, 2]])
    weights = torch.rand(M, 2, generator=torch.Generator().manual_seed(4))
    order = ids.reshape(-1).sort(stable=True).indices
    ends = torch.bincount(ids.reshape(-1), minlength=EXPERTS).cumsum(0).int()
    product = Nvfp4Product(w13.quantized, recipe, BlockSelector(recipe, K, 3), "w13")
    gate, up = product.grouped_matmul(x[order // 2], ends).chunk(2, -1)
    product = Nvfp4Product(w2.quantized, recipe, BlockSelector(recipe, INNER, 4), "w2")
    y = product.grouped_matmul(F.silu(gate) * up, ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    wanted = (y[back].unflatten(0, (-1, 2)) * weights.unsqueeze(-1)).sum(1)
    prepared = (gemm.prepare_weight(w13, interleave=True), gemm.prepare_weight(w2))
    rows = tuple(device.Activations(recipe, k, seed, x.device) for k, seed in ((K, 3), (INNER, 4)))
    got = device.experts(x, weights, ids, prepared, rows, calibrate=True)  # type: ignore[arg-type]
    assert float((got.float() - wanted).abs().max()) <= float(wanted.abs().max()) * 2**-4


@interpreted
def test_padding_rows_take_no_part_in_a_batch_selection() -> None:
    """Rows of garbage after the tokens, as a CUDA graph has them, change no bit of the tokens."""
    from quads.integrations.vllm_plugin import device
    from quads.kernels import gemm

    recipe, x = recipe_of("batch"), inputs()
    prepared = tuple(
        gemm.prepare_weight(pack(shape, recipe, seed), interleave=seed == 1)
        for seed, shape in ((1, (EXPERTS, 2 * INNER, K)), (2, (EXPERTS, K, INNER)))
    )
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 1], [1, 0], [2, 1], [0, 2]])
    weights = torch.rand(M, 2, generator=torch.Generator().manual_seed(4))
    run = lambda x, w, ids, padding: device.experts(  # noqa: E731
        x, w, ids, prepared, tuple(device.Activations(recipe, k, 3, x.device) for k in (K, INNER)), padding=padding
    )
    garbage = torch.tensor([float("nan"), 1e30, float("inf")]).bfloat16().unsqueeze(1).expand(3, K)
    padded = (torch.cat([x, garbage]), torch.cat([weights, weights[:3]]), torch.cat([ids, ids[:3] + 77]))
    padding = torch.arange(M + 3) >= M
    assert torch.equal(run(*padded, padding)[:M], run(x, weights, ids, None))


@interpreted
@pytest.mark.parametrize("scope", ["none", "batch", "static"])
def test_vllms_own_gemm_takes_the_rows_that_the_kernels_quantise(scope: str) -> None:
    """K = 96 with half its blocks repeated: the repeated columns begin inside an atom of scales."""
    from quads.integrations.vllm_plugin import device, fp4, weights
    from quads.kernels import prepack
    from tests.quads.fp4_contract import Emulated

    recipe, x = recipe_of(scope).replace(activation_outer="tensor"), inputs()
    weight, layer, rows = pack((64, K), recipe, 1), torch.nn.Module(), device.Activations(recipe, K, 3, x.device)
    native = prepack.prepare_native(weight)
    weights.write(layer, "w", fp4.augmented(native, rows.extra))
    operand = fp4.weight_of(layer, "w", native, Emulated().run)
    wanted = Nvfp4Product(weight.quantized, recipe, BlockSelector(recipe, K, 3), "w").matmul(x)
    assert torch.equal(device.fp4_matmul(x, operand, rows, calibrate=True), wanted)


@interpreted
def test_a_static_list_is_kept_in_its_storage_until_it_is_refreshed() -> None:
    from quads.integrations.vllm_plugin import device

    rows = device.Activations(recipe_of("static"), K, 0, torch.device("cpu"))
    listed: Any = rows.list
    at = listed.blocks.data_ptr()
    _, placeholder = rows.operand(inputs())
    assert placeholder is not None
    assert placeholder.tolist() == [0, 1, 2]
    rows.operand(inputs() * torch.tensor([1.0] * 48 + [9.0] * 48).bfloat16(), calibrate=True)
    assert listed.blocks.tolist() == [3, 4, 5]
    rows.operand(inputs(), calibrate=True)
    assert listed.blocks.tolist() == [3, 4, 5]
    listed.end_of_rollout()
    rows.operand(inputs() * torch.tensor([9.0] * 48 + [1.0] * 48).bfloat16(), calibrate=True)
    assert listed.blocks.tolist() == [0, 1, 2]
    rows.forget_warm_up()
    rows.operand(inputs() * torch.tensor([1.0] * 48 + [9.0] * 48).bfloat16(), calibrate=True)
    assert listed.blocks.tolist() == [3, 4, 5]
    assert listed.blocks.data_ptr() == at


@pytest.mark.skipif(support.interpreting(), reason="this is the interpreter's own process")
def test_all_of_it_in_a_process_with_the_interpreter() -> None:
    """TRITON_INTERPRET must be set before Triton's import, and a process that has it cannot compile."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert "14 passed" in run.stdout
