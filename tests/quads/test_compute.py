"""bfloat16 products over float32 masters: what they see, and that the quantised weights stay those of the master."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quads.compensation import BlockSelector
from quads.compute import ROLLOUT, TRAINER, Implementation, compute, implementation
from quads.emulation.quantizers import quantize
from quads.operand import OperandWeight
from quads.qat import prepare_qat
from quads.qdq import fp8_weight
from quads.recipes import load
from quads.rollout import Fp8Product, Nvfp4Product, rollout_numerics
from quads.sync import export_weights, verify_sync
from tests.quads.tiny import tiny_model, tokens

CPU = torch.device("cpu")


class _Seen:
    """A product that notes the dtype of what it is given."""

    dtypes: list[torch.dtype]

    def __init__(self) -> None:
        self.dtypes = []

    def expert(self, index: int) -> _Seen:
        return self

    def matmul(self, x: Tensor) -> Tensor:
        self.dtypes.append(x.dtype)
        return x

    def grouped_matmul(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.matmul(x)


def test_a_quantised_product_sees_bfloat16_activations_only_under_bfloat16_compute() -> None:
    seen = _Seen()
    weight = OperandWeight.wrap(torch.eye(4), seen)
    F.linear(torch.ones(2, 4), weight)
    with compute("bfloat16", CPU):
        F.linear(torch.ones(2, 4), weight)
        F.grouped_mm(torch.ones(2, 4), OperandWeight.wrap(torch.ones(1, 4, 4), seen, k_last=False), offs=None)
    with compute("float32", CPU):
        F.linear(torch.ones(2, 4), weight)
    assert seen.dtypes == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]


def test_grouped_expert_products_are_bfloat16_too() -> None:
    x, w = torch.full((4, 16), 1 + 2**-10), torch.full((1, 16, 16), 1.0)
    ends = torch.tensor([4], dtype=torch.int32)
    with compute("bfloat16", CPU):
        assert F.grouped_mm(x, w, offs=ends).dtype == torch.bfloat16
    assert F.grouped_mm(x, w, offs=ends)[0, 0] > 16


@pytest.mark.parametrize("name", ["quads", "symmetric", "trace", "bf16"])
def test_gradients_reach_float32_masters(name: str) -> None:
    model, recipe = tiny_model(), load(name)
    prepare_qat(model, recipe)
    with compute("bfloat16", CPU):
        loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.ndim > 1]
    assert all(g is not None and g.dtype == torch.float32 and g.isfinite().all() and g.any() for g in grads)


def test_the_quantised_weights_under_bfloat16_compute_are_those_of_the_master() -> None:
    model, recipe = tiny_model(), load("quads")
    prepare_qat(model, recipe)
    with compute("bfloat16", CPU), rollout_numerics(model, recipe) as rollout, torch.no_grad():
        model(tokens())
        multiplied = list(rollout.packed_weights())
    assert verify_sync(model, recipe, multiplied) == verify_sync(model, recipe, export_weights(model, recipe)) > 0


def test_bfloat16_compute_differs_from_float32_by_its_rounding_and_stays_near() -> None:
    model = tiny_model()
    with torch.no_grad():
        exact = model(tokens()).logits
        with compute("bfloat16", CPU):
            rounded = model(tokens()).logits.float()
    assert 0 < float((exact - rounded).abs().max()) < 0.1


def test_an_implementation_holds_inside_its_context_only() -> None:
    model = tiny_model()
    before = (model.config._attn_implementation, model.config._experts_implementation)
    for chosen in (TRAINER, ROLLOUT, Implementation("eager")):
        with implementation(model, chosen):
            assert model.config._attn_implementation == chosen.attention
        assert (model.config._attn_implementation, model.config._experts_implementation) == before
    dense = tiny_model("llama")
    with implementation(dense, TRAINER), torch.no_grad():
        dense(tokens())


def test_a_quantised_product_sums_in_the_precision_that_it_says_under_autocast() -> None:
    """Autocast would round FP8's dequantised operands to bfloat16 before they are multiplied."""
    torch.manual_seed(0)
    x, w = torch.randn(8, 256).bfloat16(), torch.randn(32, 256)
    for product in (Fp8Product(fp8_weight(w)), Nvfp4Product(quantize(w), load("nvfp4"), _no_residual(256), "w")):
        expected = product.matmul(x)
        with compute("bfloat16", CPU):
            assert torch.equal(F.linear(x.float(), OperandWeight.wrap(w, product)), expected)


def _no_residual(k: int) -> BlockSelector:
    return BlockSelector(load("nvfp4"), k, 0)
