"""On a GPU the rollout's operands are the emulator's bytes, and its products differ by less than the stated bound."""

import pytest
import torch

from quads import qdq, recipes
from quads.compensation import BlockSelector, augment
from quads.emulation import layout, quantizers
from quads.rollout import Nvfp4Product, rollout_numerics
from tests.quads.tiny import tiny_model, tokens

pytestmark = pytest.mark.gpu
QUADS = recipes.named()["quads"]
SCOPES = ["batch", "token", "tile", "static", "random"]
SHARED = ["batch", "token", "static", "random"]  # scopes whose operand the emulator lays out in the same columns
EXPERTS, N, K = 3, 96, 128


def pair(recipe: recipes.Recipe, experts: int = EXPERTS):
    from quads.kernel_product import KernelProduct

    torch.manual_seed(0)
    weight = torch.randn(experts, N, K).bfloat16()
    outer = (weight.float().abs().amax(dim=(1, 2), keepdim=True) / 2688.0).float()
    cpu, gpu = qdq.pack(weight, recipe, outer, "w"), qdq.pack(weight.cuda(), recipe, outer.cuda(), "w")
    emulated = Nvfp4Product(cpu.quantized, recipe, BlockSelector(recipe, K, 0), "w")
    return emulated, KernelProduct(gpu, BlockSelector(recipe, K, 0))


def activations(rows: int) -> torch.Tensor:
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows))
    x[:, 5] *= 30
    return x.bfloat16()


@pytest.mark.parametrize("scope", SHARED)
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_operands_are_the_bytes_of_the_emulator(scope: str, ratio: float) -> None:
    recipe = QUADS.replace(rac_scope=scope, rac_ratio=ratio)
    emulated, kernel = pair(recipe)
    x = activations(37)
    a, blocks = kernel.quantize(x.cuda(), torch.tensor([37], dtype=torch.int32).cuda())
    q = quantizers.quantize(x, granularity="token")
    for rows, _, chosen, keep in emulated.selector.select(x, q, [slice(0, 37)]):
        expected, _ = augment(x, q, qdq.NVFP4Tensor(*(t[0] for t in _fields(emulated.weight))), chosen, keep)
        assert torch.equal(layout.unpack(a.packed.cpu())[rows], expected.codes)
        assert torch.equal(a.scales.cpu()[rows], expected.scales)
        assert blocks is None or blocks.tolist() == chosen.tolist()


def _fields(q: quantizers.NVFP4Tensor) -> tuple[torch.Tensor, ...]:
    return q.codes, q.scales, q.outer


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("ends", [[5, 5, 40], [0, 0, 300], [100, 200, 300], [7, 9, 9]])
def test_grouped_products_agree_within_the_accumulation_bound(scope: str, ends: list[int]) -> None:
    emulated, kernel = pair(QUADS.replace(rac_scope=scope))
    x, bounds = activations(max(ends[-1], 1) + 3), torch.tensor(ends, dtype=torch.int32)
    ours = emulated.grouped_matmul(x, bounds).float()
    theirs = kernel.grouped_matmul(x.cuda(), bounds.cuda()).cpu().float()
    # FP32 sums in another order (within 2^-20 of the sum of magnitudes), then one BF16 rounding: at most one ulp.
    slack = ours.abs() * 2.0**-7 + x.float().norm(dim=-1, keepdim=True) * 2.0**-16
    assert ((ours - theirs).abs() <= slack).all()
    assert not theirs[ends[-1] :].any()


@pytest.mark.parametrize("scope", SCOPES)
def test_a_product_of_all_rows_is_the_same_without_asking_where_they_end(scope: str) -> None:
    _, kernel = pair(QUADS.replace(rac_scope=scope))
    x, ends = activations(300).cuda(), torch.tensor([100, 200, 300], dtype=torch.int32).cuda()
    expected = kernel.grouped_matmul(x, ends)
    kernel.whole = True
    assert torch.equal(kernel.grouped_matmul(x, ends), expected)


@pytest.mark.parametrize("name", ["nvfp4", "quads", "w4a16", "fp8", "symmetric"])
def test_a_model_rolls_out_on_the_gpu_as_on_the_cpu(name: str) -> None:
    recipe = recipes.named()[name]
    logits = []
    for device in ("cpu", "cuda"):
        model = tiny_model(dtype=torch.bfloat16).to(device)
        with rollout_numerics(model, recipe), torch.no_grad():
            logits.append(model(tokens().to(device)).logits.float().cpu())
    torch.testing.assert_close(*logits, rtol=0, atol=0.02)
