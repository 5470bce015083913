"""Attribution: each variant is the numerics it claims, errors are the norms they claim, and the model is left alone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quads import recipes
from quads.attribution import Plan, TokenBatch, default_recipe, diagnose, diagnose_tokens
from quads.attribution.batch import pad
from quads.attribution.errors import LocalErrors
from quads.attribution.gaps import paired_difference, term_shares
from quads.attribution.inputs import SEED_STRIDE, QuantizedRows
from quads.attribution.layerwise import LayerwiseRun
from quads.attribution.products import SiteWeights, outputs
from quads.attribution.variants import (
    ACTIVATIONS_VARIANT,
    BOTH_VARIANT,
    ENGINE_VARIANT,
    REFERENCE,
    REFERENCE_VARIANT,
    WEIGHTS,
    WEIGHTS_VARIANT,
    ladder,
    only_layer,
)
from quads.compensation import BlockSelector
from quads.emulation import quantizers
from quads.gap import token_logps
from quads.recipes import RecipeError
from quads.rollout import Nvfp4Product, rollout_numerics
from quads.sites import find_sites
from tests.quads.tiny import FAMILIES, tiny_model, tokens

NVFP4 = recipes.named()["nvfp4"]
SMALL = Plan(ratios=(0.5, 1.0), scopes=("batch", "random"), seeds=(0,), isolate=False)
SCOPES = st.sampled_from(["batch", "random", "token"])


def whole(ids: torch.Tensor) -> TokenBatch:
    real = torch.ones_like(ids, dtype=torch.bool)
    return TokenBatch(ids, real, real[:, 1:])


def run(model, variants, ids=None, recipe=None, **options):
    recipe = recipe or default_recipe(model)
    ids = tokens() if ids is None else ids
    return LayerwiseRun(model, find_sites(model, recipe), recipe, variants, **options)(ids, torch.ones_like(ids).bool())


def logps(model, ids=None):
    ids = tokens() if ids is None else ids
    with torch.no_grad():
        return torch.stack([token_logps(a, b) for a, b in zip(model(ids).logits, ids, strict=True)])


def activations(rows: int, k: int = 64, seed: int = 0) -> torch.Tensor:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
    x[:, 3] *= 20
    return x


def first_weight(model, recipe=None) -> SiteWeights:
    return SiteWeights(find_sites(model, recipe or default_recipe(model))[0], NVFP4, 0)


# The numerics of a variant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_the_model_bit_for_bit(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    model.set_attn_implementation("eager")
    assert torch.equal(run(model, [BOTH_VARIANT])[REFERENCE], logps(model))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_weights_alone_are_the_w4a16_rollout_bit_for_bit(family: str) -> None:
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    recipe = default_recipe(model)
    with rollout_numerics(model, recipe.replace(rollout_activations="bf16")):
        expected = logps(model)
    # The grouped product of the rollout and expert-by-expert products may add in another order.
    found = run(model, [WEIGHTS_VARIANT])[WEIGHTS]
    assert torch.equal(found, expected) if family == "llama" else torch.allclose(found, expected, atol=1e-5)
    assert (found - run(model, [])[REFERENCE]).abs().max() > 1e-3


@given(st.integers(1, 6), st.integers(0, 10**6), SCOPES, st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_a_product_is_the_rollouts_up_to_the_order_of_its_float32_sum(rows, seed, scope, ratio) -> None:
    x, weights = activations(rows, seed=seed), first_weight(tiny_model("llama"))
    recipe = NVFP4.replace(rac_ratio=ratio, rac_scope=scope)
    selector = BlockSelector(recipe, 64, 0)
    quantized = quantizers.quantize(weights.master[0], weights.outer)
    expected = Nvfp4Product(quantized, recipe, selector, "layer").matmul(x)
    variant = ladder((ratio,), (scope,), (0,))[0] if 0 < ratio < 1 else BOTH_VARIANT
    variant = ladder((1.0,), ("batch",), (0,))[0] if ratio == 1 else variant
    found = outputs(variant, x, [(slice(0, rows), 0)], weights, QuantizedRows(x, "token", "layer", 0))
    # n products summed in any order are within n 2^-23 of the sum of magnitudes; two such sums, and alpha's rounding.
    q = quantizers.quantize(x, granularity="token")
    r = quantizers.quantize(x - quantizers.dequantize(q), q.outer)
    magnitude = (quantizers.dequantize(q).abs() + quantizers.dequantize(r).abs()) @ weights.value[0].abs().T
    assert ((found - expected).abs() <= 2 * (128 + 4) * 2.0**-23 * magnitude).all()


@given(st.integers(1, 6), st.integers(0, 10**6), SCOPES, st.sampled_from([0.125, 0.25, 0.5, 0.75]))
def test_a_variant_compensates_the_blocks_that_the_rollout_selects(rows, seed, scope, ratio) -> None:
    x = activations(rows, k=128, seed=seed)
    selector = BlockSelector(NVFP4.replace(rac_ratio=ratio, rac_scope=scope), 128, seed % 3 * SEED_STRIDE)
    q = quantizers.quantize(x, granularity="token")
    _, _, blocks, mask = next(iter(selector.select(x, q, [slice(0, rows)])))
    expected = mask if mask is not None else torch.zeros(1, 8, dtype=torch.bool).index_fill(1, blocks, True)
    variant = ladder((ratio,), (scope,), (seed % 3,))[0]
    assert torch.equal(QuantizedRows(x, "token", "layer", 0).keep(variant), expected)


def test_a_term_in_one_layer_is_the_recipe_of_that_layer() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    recipe = default_recipe(model)
    found = run(model, [only_layer(WEIGHTS_VARIANT, 1)])[f"{WEIGHTS}@layer-1"]
    with rollout_numerics(model, recipe.replace(modules=[r"layers\.1\."], rollout_activations="bf16")):
        assert torch.equal(found, logps(model))


def test_the_engine_variant_moves_rounding_only() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    found = run(model, [ENGINE_VARIANT, BOTH_VARIANT])
    drift, both = ((found[name] - found[REFERENCE]).abs().mean() for name in ("engine", "both"))
    assert 0 < drift < both / 3


def test_what_stands_in_padding_changes_nothing() -> None:
    ids, variants = tokens(3, 12), [BOTH_VARIANT, *ladder((0.5,), ("batch", "token"), (0,))]
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1, 7:] = False
    model = tiny_model("qwen3_moe")
    recipe = default_recipe(model)
    results = []
    for filler in (0, 63):
        padded = torch.where(real, ids, filler)
        results.append(LayerwiseRun(model, find_sites(model, recipe), recipe, variants)(padded, real))
    for name in results[0]:
        assert torch.equal(results[0][name][real[:, 1:]], results[1][name][real[:, 1:]]), name


# Errors of layers


def observed(model, variants, ids=None) -> tuple[LocalErrors, dict[str, torch.Tensor]]:
    ids = tokens() if ids is None else ids
    local, inputs = LocalErrors(variants, tuple(ids.shape)), {}

    def observe(weights, x, rows, groups, cache) -> None:
        inputs[weights.place.name] = (x, rows, groups)
        local.observe(weights, x, rows, groups, cache)

    run(model, variants, ids, observe=observe)
    return local, inputs


def test_layer_errors_are_the_norms_of_the_method() -> None:
    model = tiny_model("llama")
    variants = [WEIGHTS_VARIANT, ACTIVATIONS_VARIANT, BOTH_VARIANT, *ladder((0.25, 0.5, 1.0), ("batch", "token"), (0,))]
    local, inputs = observed(model, variants)
    for index, site in enumerate(find_sites(model, default_recipe(model))):
        x, _, groups = inputs[site.name]
        w, weights = site.weight.double(), SiteWeights(site, NVFP4, index)
        rows = QuantizedRows(x, "token", site.name, index)
        q_w = quantizers.dequantize(quantizers.quantize(site.weight, weights.outer.reshape(()))).double()
        q_x = quantizers.dequantize(rows.q).double()
        norm = (x.double() @ w.T).norm()
        errors = local.relative(site.name)
        assert errors[WEIGHTS, REFERENCE] == pytest.approx(((x.double() @ (q_w - w).T).norm() / norm).item(), rel=1e-4)
        by_hand = ((q_x - x.double()) @ q_w.T).norm() / norm
        assert errors["both", WEIGHTS] == pytest.approx(by_hand.item(), rel=1e-4)
        for variant in variants[3:]:
            y = outputs(variant, x, groups, weights, rows).double()
            by_hand = (y - x.double() @ w.T).norm() / norm
            assert errors[variant.name, REFERENCE] == pytest.approx(by_hand.item(), rel=1e-4)


def test_errors_of_experts_and_of_tokens_are_sums_of_the_same_rows() -> None:
    model = tiny_model("qwen3_moe")
    local, inputs = observed(model, [WEIGHTS_VARIANT, BOTH_VARIANT])
    for name, site in local.sites.items():
        assert torch.allclose(site.by_token.sum((1, 2)), site.by_expert.sum(1), rtol=1e-12)
        x, rows, groups = inputs[name]
        weight = dict(model.named_parameters())[name]
        expected = torch.zeros(site.by_token[0].numel(), dtype=torch.float64)
        for part, expert in groups:
            expected.index_add_(0, rows[part], (x[part] @ weight[expert].T).square().sum(-1).double())
        assert torch.allclose(site.by_token[0].flatten(), expected, rtol=1e-5)


def test_rows_of_a_grouped_product_belong_to_the_tokens_that_chose_the_expert() -> None:
    model = tiny_model("qwen3_moe")
    seen: dict[str, torch.Tensor] = {}
    experts = model.model.layers[0].mlp.experts
    handle = experts.register_forward_pre_hook(lambda module, args: seen.update(hidden=args[0]))
    _, inputs = observed(model, [BOTH_VARIANT])
    handle.remove()
    x, rows, _ = inputs["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(x, seen["hidden"][rows])


def test_an_expert_without_tokens_has_no_error() -> None:
    model = tiny_model("qwen3_moe")
    result = diagnose_tokens(model, whole(tokens(1, 8)), plan=SMALL)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()  # every token ties and takes the same two experts
    result = diagnose_tokens(model, whole(tokens(1, 8)), plan=SMALL)
    first = [row["weights"] for row in result.experts if row["layer"] == 0 and row["projection"] == "down_proj"]
    assert sum(value is None for value in first) == 2 and all(value > 0 for value in first if value is not None)


# Statistics and tables


@given(st.lists(st.floats(-1, 1), min_size=6, max_size=6), st.integers(0, 100))
def test_shares_of_terms_sum_to_one(values: list[float], seed: int) -> None:
    parts = torch.tensor(values).reshape(3, 1, 2) + torch.rand(3, 1, 2, generator=torch.Generator().manual_seed(seed))
    shares = term_shares(dict(zip("abc", parts, strict=True)), torch.ones(1, 2, dtype=torch.bool))
    total = parts.double().sum(0).square().sum()
    assert total == 0 or math.isclose(sum(shares.values()), 1, rel_tol=1e-6)


def test_a_paired_difference_finds_what_overlapping_intervals_hide() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(20, 10, generator=generator) * torch.linspace(0.1, 5, 20).unsqueeze(1)
    better = base * 0.98
    mean, low, high = paired_difference(better, base, torch.zeros(20, 10), torch.ones(20, 10, dtype=torch.bool))
    assert low < mean < high < 0


def test_recorded_log_probabilities_split_into_terms_that_sum_to_their_gap() -> None:
    model = tiny_model("llama")
    ids = tokens(4, 12)
    drift = torch.randn(4, 11, generator=torch.Generator().manual_seed(3)) * 0.01
    recorded = run(model, [BOTH_VARIANT], ids)["both"] + drift
    batch = whole(ids)
    batch = TokenBatch(batch.tokens, batch.real, batch.counted, recorded)
    result = diagnose_tokens(model, batch, plan=SMALL)
    terms = {row["term"]: row for row in result.terms}
    assert terms["engine"]["source"] == "recorded"
    assert terms["engine"]["mean"] == pytest.approx(drift.abs().mean().item(), rel=1e-3)
    assert sum(row["share"] for row in terms.values()) == pytest.approx(1)
    assert "engine drift" in result.advice and f"{terms['engine']['mean']:.4f}" in result.advice


@pytest.mark.parametrize("name", ["bf16", "w4a16", "nvfp4", "rac", "quads-random", "quads-full"])
def test_a_recorded_rollout_is_held_against_its_own_recipe(name: str) -> None:
    model, ids = tiny_model("llama"), tokens(4, 12)
    model.set_attn_implementation("eager")
    recipe = recipes.named()[name].replace(modules=[r"layers\.\d+\."])
    with rollout_numerics(model, recipe):
        recorded = logps(model, ids)
    batch = TokenBatch(ids, torch.ones_like(ids).bool(), torch.ones(4, 11).bool(), recorded)
    terms = {row["term"]: row["mean"] for row in diagnose_tokens(model, batch, plan=SMALL, recipe=recipe).terms}
    assert terms["engine"] < 2e-4, "the emulated rollout itself: only the order of float32 sums is left"
    assert (terms["weight"] > 1e-3) == (name != "bf16")
    assert (terms["activation"] > 1e-3) == (name not in ("bf16", "w4a16"))


@pytest.mark.parametrize("changes", [{"rac_scope": "tile"}, {"rac_scope": "static"}])
def test_numerics_that_are_not_emulated_are_refused(changes) -> None:
    recipe = recipes.named()["rac"].replace(modules=[r"layers\."], **changes)
    with pytest.raises(RecipeError, match=f"not rac_scope '{changes['rac_scope']}'"):
        diagnose_tokens(tiny_model("llama"), whole(tokens()), recipe=recipe)
    with pytest.raises(RecipeError, match="not rollout_weights 'fp8'"):
        diagnose_tokens(tiny_model("llama"), whole(tokens()), recipe=recipes.named()["fp8"])


def test_mixed_dtypes_are_named() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    model.model.layers[1].mlp.down_proj.float()
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj is torch\.float32 but its activations are"):
        diagnose_tokens(model, whole(tokens()), plan=SMALL)


def test_a_planted_bad_layer_ranks_first_and_keeping_it_helps_most() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        # Values that E2M1 cannot hold beside a large one in the same block, in layer 1 only.
        weight = model.model.layers[1].mlp.down_proj.weight
        weight[:, ::16] *= 30
        model.model.layers[1].mlp.up_proj.weight *= 3
    result = diagnose_tokens(model, whole(tokens(4, 12)), plan=Plan(ratios=(0.5,), scopes=("batch",), keep=(1,)))
    assert result.ranking()[0]["layer"] == 1
    assert result.kept[0]["layers"] == [1]
    assert result.kept[0]["mean"] < result.gap("both")["mean"]
    assert "Keeping layer 1 in BF16" in result.advice


def test_every_table_names_every_variant() -> None:
    plan = Plan(ratios=(0.25, 1.0), seeds=(0, 1))
    result = diagnose_tokens(tiny_model("llama"), whole(tokens(3, 12)), plan=plan)
    names = {variant.name for variant in plan.everywhere()}
    assert names == {"weights", "activations", "both", "engine", "rac-25", "rac-100", "token-25"} | {
        "random-25-s0",
        "random-25-s1",
    }
    assert {row["variant"] for row in result.gaps} == names == {row["variant"] for row in result.errors}
    assert {row["term"] for row in result.isolated} == {"weights", "activations", "both"}
    assert {row["minus"] for row in result.paired} == {"random-25-s0", "random-25-s1", "token-25"}
    assert all(row["tokens"] == 33 for row in result.gaps)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_diagnosed_and_is_left_as_it_was(family: str) -> None:
    model = tiny_model(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = logps(model)
    result = diagnose_tokens(model, whole(tokens()), plan=SMALL)
    assert result.gap("rac-100", WEIGHTS)["mean"] < result.gap("both", WEIGHTS)["mean"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(logps(model), expected)
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)


# Bad input


def test_nan_in_one_expert_is_named_and_the_model_left_alone() -> None:
    model = tiny_model("qwen3_moe")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[2, 3, 5] = math.nan
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj expert 2 holds NaN .* \[2, 3, 5\]"):
        diagnose_tokens(model, whole(tokens()), plan=SMALL)
    assert "gate_up_proj" in model.model.layers[0].mlp.experts._parameters
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)
    assert model.config._attn_implementation == "sdpa"


def test_activations_that_are_not_finite_are_named() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[7] = math.inf
    with pytest.raises(ValueError, match=r"activations of model\.layers\.1\.self_attn\.q_proj .* holds NaN or Inf"):
        diagnose_tokens(model, whole(tokens()), plan=SMALL)


def test_a_weight_outside_the_decoder_layers_is_refused_by_name() -> None:
    with pytest.raises(RecipeError, match="lm_head, which is in no decoder layer"):
        diagnose_tokens(tiny_model("llama"), whole(tokens()), recipe=NVFP4.replace(modules=["lm_head"]))


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="sequence 2 holds token 64 at 3: the model knows 0 to 63"):
        diagnose_tokens(tiny_model("llama"), pad([[1, 2, 3, 4], [1, 2, 3, 64]]))


def test_prompts_too_short_or_absent_are_refused() -> None:
    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [1] * len(text)}

    with pytest.raises(ValueError, match="prompt 2 has 3 tokens"):
        diagnose(tiny_model("llama"), tokenizer, ["long enough", "abc"])
    with pytest.raises(ValueError, match="no prompts"):
        diagnose(tiny_model("llama"), tokenizer, [])
    with pytest.raises(ValueError, match="no tokenizer"):
        diagnose(tiny_model("llama"), None, ["long enough"])


@pytest.mark.parametrize("fields", [{"ratios": (0.0,)}, {"ratios": (1.5,)}, {"seeds": ()}])
def test_a_plan_refuses_what_means_nothing(fields) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Plan(**fields)


def test_the_reference_variant_touches_nothing() -> None:
    weights = first_weight(tiny_model("llama"))
    assert not REFERENCE_VARIANT.touches(weights.place)
    assert BOTH_VARIANT.touches(weights.place) and not only_layer(BOTH_VARIANT, 1).touches(weights.place)
