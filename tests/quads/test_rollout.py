"""Rollout numerics: the invariants of the method, on whole models and on single products, compared bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quads import recipes
from quads.compensation import BlockSelector
from quads.emulation import quantizers
from quads.qat import prepare_qat
from quads.recipes import Recipe
from quads.rollout import Nvfp4Product, rollout_numerics
from tests.quads.tiny import FAMILIES, tiny_model, tokens

NAMED = recipes.named()
QUADS = NAMED["quads"]


def logits(model, recipe: Recipe, ids: torch.Tensor | None = None) -> torch.Tensor:
    with rollout_numerics(model, recipe), torch.no_grad():
        return model(tokens() if ids is None else ids).logits


def product(recipe: Recipe, n: int = 24, k: int = 64, seed: int = 0) -> Nvfp4Product:
    generator = torch.Generator().manual_seed(seed)
    weight = quantizers.quantize(torch.randn(n, k, generator=generator).bfloat16())
    return Nvfp4Product(weight, recipe, BlockSelector(recipe, k, seed), "layer")


def activations(rows: int, k: int = 64, seed: int = 0, outlier: float = 1.0) -> torch.Tensor:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed + 100))
    x[:, 3] *= outlier
    return x.bfloat16()


@given(st.integers(1, 9), st.integers(0, 10**6), st.sampled_from(["token", "tile", "batch", "static", "random"]))
def test_ratio_0_equals_naive_bit_for_bit(rows: int, seed: int, scope: str) -> None:
    x = activations(rows, seed=seed)
    none = QUADS.replace(rac_ratio=0.0, rac_scope=scope)
    assert torch.equal(product(none).matmul(x), product(NAMED["nvfp4"]).matmul(x))


@given(st.integers(1, 9), st.integers(0, 10**6))
def test_ratio_100_is_one_gemm_over_both_quantisations_in_every_scope(rows: int, seed: int) -> None:
    x = activations(rows, seed=seed)
    results = [product(QUADS.replace(rac_ratio=1.0, rac_scope=s)).matmul(x) for s in ("all", "batch", "token", "tile")]
    assert all(torch.equal(results[0], other) for other in results[1:])
    p = product(QUADS)
    q = quantizers.quantize(x, granularity="token")
    r = quantizers.quantize(x.float() - quantizers.dequantize(q), q.outer)
    w = quantizers.unscaled(p.weight).double()
    exact = (quantizers.unscaled(q).double() + quantizers.unscaled(r).double()) @ w.T
    assert torch.equal(results[0], (exact.float() * (q.outer * p.weight.outer)).bfloat16())


@given(st.integers(0, 10**6), st.sampled_from([0.25, 0.5, 0.75]))
def test_batch_scope_of_one_row_equals_token_scope(seed: int, ratio: float) -> None:
    x = activations(1, seed=seed)
    batch, token = (product(QUADS.replace(rac_ratio=ratio, rac_scope=s)).matmul(x) for s in ("batch", "token"))
    assert torch.equal(batch, token)


@given(st.integers(0, 10**6))
def test_in_token_scope_a_row_does_not_depend_on_the_other_rows(seed: int) -> None:
    p = product(QUADS.replace(rac_scope="token"))
    x = activations(5, seed=seed)
    assert torch.equal(p.matmul(x)[2:3], p.matmul(x[2:3]))


def test_in_batch_scope_a_row_does_depend_on_the_other_rows() -> None:
    p = product(QUADS)
    x = activations(2, seed=3)
    other = x.clone()
    other[1] *= torch.linspace(0, 9, 64).bfloat16()
    assert not torch.equal(p.matmul(x)[0], p.matmul(other)[0])


def test_top_blocks_beat_random_ones_where_there_are_outliers() -> None:
    recipe = QUADS.replace(rac_ratio=0.25)
    x = activations(64, outlier=64.0)
    p = product(recipe)
    exact = x.double() @ quantizers.dequantize(p.weight).double().T
    top = (p.matmul(x).double() - exact).norm()
    draws = [product(recipe.replace(rac_scope="random"), seed=0) for _ in range(4)]
    for seed, draw in enumerate(draws):
        draw.selector.seed = seed
    random = min((d.matmul(x).double() - exact).norm() for d in draws if 0 not in d.selector._draw())
    assert top < random


def test_compensation_shrinks_the_error_of_a_product() -> None:
    x = activations(64)
    errors = []
    for ratio in (0.0, 0.25, 0.5, 0.75, 1.0):
        p = product(QUADS.replace(rac_ratio=ratio))
        exact = x.double() @ quantizers.dequantize(p.weight).double().T
        errors.append(float((p.matmul(x).double() - exact).norm()))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.3 * errors[0]


def test_a_static_selection_is_kept_until_it_is_refreshed() -> None:
    recipe = QUADS.replace(rac_scope="static", rac_refresh=2, rac_ratio=0.25)
    selector = BlockSelector(recipe, 64, 0)
    first, second = activations(4, seed=1), activations(4, seed=2)
    second[:, 48:] *= 50

    def blocks(x: torch.Tensor) -> list[int]:
        q = quantizers.quantize(x, granularity="tensor")
        return next(iter(selector.select(x, q, [slice(0, 4)])))[2].tolist()

    kept = blocks(first)
    assert blocks(second) == kept and kept != [3]
    selector.end_of_rollout()
    assert blocks(second) == kept
    selector.end_of_rollout()
    assert blocks(second) == [3]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["fp8", "nvfp4", "w4a16", "quads"])
def test_every_family_rolls_out_under_every_format_and_comes_back(family: str, name: str) -> None:
    recipe = NAMED[name].replace(modules=(r"_proj$", r"\.experts\."))
    model = tiny_model(family)
    before = model(tokens()).logits
    inside = logits(model, recipe)
    assert torch.isfinite(inside).all() and not torch.equal(inside, before)
    assert torch.equal(model(tokens()).logits, before)


def test_w4a16_rolls_out_what_the_qat_trainer_computes() -> None:
    model = tiny_model()
    rolled = logits(model, NAMED["w4a16"])
    prepare_qat(model, NAMED["w4a16"])
    assert torch.equal(model(tokens()).logits, rolled)
    assert torch.equal(logits(model, NAMED["w4a16"]), rolled)  # also with QAT installed


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_the_experts_implementation_of_the_model_does_not_matter(implementation: str) -> None:
    model = tiny_model()
    expected = logits(model, QUADS)
    model.set_experts_implementation(implementation)
    assert torch.equal(logits(model, QUADS), expected)
    assert model.config._experts_implementation == implementation


def test_an_error_inside_the_context_still_restores_the_model() -> None:
    model = tiny_model()
    before = model(tokens()).logits
    with pytest.raises(RuntimeError, match="boom"), rollout_numerics(model, QUADS):
        raise RuntimeError("boom")
    assert torch.equal(model(tokens()).logits, before)


def test_non_finite_weights_and_activations_are_named() -> None:
    model = tiny_model()
    model.model.embed_tokens.weight.data[5] = float("nan")
    with pytest.raises(ValueError, match=r"activations of model\.layers\.0\.mlp\.experts\.gate_up_proj .* NaN or Inf"):
        logits(model, QUADS, torch.full((1, 4), 5))
    model.model.layers[0].mlp.experts.gate_up_proj.data[3, 0, 0] = float("inf")
    with pytest.raises(ValueError, match="gate_up_proj expert 3 holds NaN or Inf"):
        logits(model, QUADS)


def test_an_expert_without_tokens_is_no_error() -> None:
    model = tiny_model()
    model.model.layers[0].mlp.gate.weight.data[1:].zero_()
    assert torch.isfinite(logits(model, QUADS, tokens(1, 1))).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_roll_out(dtype: torch.dtype) -> None:
    out = logits(tiny_model(dtype=dtype), QUADS)
    assert out.dtype == dtype and torch.isfinite(out).all()
