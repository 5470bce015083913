"""Arms and references of a probe are what trainer and rollout compute themselves, and they can be told apart."""

import pytest
import torch

from quads import recipes
from quads.attribution.layerwise import LayerwiseRun
from quads.attribution.variants import ACTIVATIONS_VARIANT, only_layer
from quads.compensation import BlockSelector
from quads.gap import token_logps
from quads.qat import prepare_qat, remove_qat
from quads.sites import find_sites
from quads.suites import probe_numerics
from quads.suites.probe_numerics import BF16, W4A4, Numerics, arm, comparison, in_layer
from tests.quads.tiny import tiny_model, tokens

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")


def logits(model, numerics: Numerics, seed: int = 0) -> torch.Tensor:
    with torch.no_grad(), numerics.entered(model, seed):
        return model(tokens()).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["quads", "nvfp4:block_rule=four_over_six", "quads:weight_block=16x16"])
def test_the_w4_reference_is_the_qat_trainers_forward_bit_for_bit(family: str, name: str) -> None:
    model = tiny_model(family)
    pair = comparison(name, "w4")
    assert pair is not None
    reference = logits(model, pair[1])
    prepare_qat(model, recipes.load(name).replace(train_weights="nvfp4"))
    with torch.no_grad():
        trainer = model(tokens()).logits
    remove_qat(model)
    assert torch.equal(reference, trainer)
    assert not torch.equal(reference, logits(model, Numerics("rollout", BF16)))


def test_every_reference_of_an_arm_is_another() -> None:
    model = tiny_model()
    names = ("bf16", "w4", "trainer")
    pairs = [comparison("symmetric", name) for name in names]
    found = [logits(model, pair[1]) for pair in pairs if pair is not None]
    assert len(found) == 3 and not any(torch.equal(found[i], found[j]) for i in range(3) for j in range(i))


@pytest.mark.parametrize(("name", "reference"), [("fp8", "w4"), ("bf16", "w4"), ("w16a4", "w4"), ("engine", "trainer")])
def test_a_reference_that_an_arm_has_not_is_none(name: str, reference: str) -> None:
    assert comparison(name, reference) is None


def test_ratio_zero_is_naive_and_ratio_one_is_full_in_every_scope() -> None:
    model = tiny_model()
    naive, full = logits(model, arm("nvfp4")), logits(model, arm("quads-full"))
    for scope in ("batch", "token", "tile", "static", "random"):
        assert torch.equal(logits(model, arm(f"quads:rac_ratio=0.0:rac_scope={scope}")), naive)
        assert torch.equal(logits(model, arm(f"quads:rac_ratio=1.0:rac_scope={scope}")), full)
    assert not torch.equal(naive, full)


@pytest.mark.parametrize("ratio", [0.125, 0.25, 0.5, 0.75])
def test_random_and_top_compensate_equally_many_channels(ratio: float) -> None:
    counts = set()
    for scope in ("batch", "random", "static", "token"):
        recipe = arm(f"quads:rac_ratio={ratio}:rac_scope={scope}").recipe
        counts.add(BlockSelector(recipe, 512, 0).count)
    assert counts == {round(32 * ratio)}


def test_the_random_control_draws_anew_with_each_seed() -> None:
    model = tiny_model()
    first, again, other = (logits(model, arm("quads-random"), seed) for seed in (0, 0, 1_000_003))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("layer", [None, 1])
def test_activations_alone_are_those_of_the_attribution(layer: int | None) -> None:
    model = tiny_model("qwen3_moe")
    model.config._attn_implementation = "eager"
    variant = ACTIVATIONS_VARIANT if layer is None else only_layer(ACTIVATIONS_VARIANT, layer)
    run = LayerwiseRun(model, find_sites(model, W4A4), W4A4, [variant])
    expected = run(tokens(), torch.ones(2, 12, dtype=torch.bool))
    numerics = arm("w16a4") if layer is None else in_layer(arm("w16a4"), layer)
    ours = token_logps(logits(model, numerics), tokens())
    torch.testing.assert_close(ours, expected[variant.name], rtol=0, atol=2e-6)
    assert float((ours - expected["reference"]).abs().max()) > 1e-4


def test_one_layer_alone_changes_nothing_before_it() -> None:
    model = tiny_model()
    numerics = in_layer(arm("nvfp4"), 1)
    with torch.no_grad():
        plain = model(tokens(), output_hidden_states=True).hidden_states
        with numerics.entered(model):
            quantized = model(tokens(), output_hidden_states=True).hidden_states
    assert torch.equal(plain[1], quantized[1]) and not torch.equal(plain[2], quantized[2])


@pytest.mark.parametrize("name", ["engine", "w16a4", "quads", "fp8", "symmetric"])
@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_the_model_is_left_as_it_was(name: str, family: str) -> None:
    model = tiny_model(family)
    before = logits(model, Numerics("rollout", BF16))
    implementation = model.config._attn_implementation, getattr(model.config, "_experts_implementation", None)
    everything = [r"layers\."] if family == "llama" else list(W4A4.modules)
    for reference in ("bf16", "w4", "trainer"):
        pair = comparison(name, reference)
        for numerics in pair or ():
            if numerics.recipe.rollout_weights != "bf16":
                numerics = Numerics(numerics.kind, numerics.recipe.replace(modules=everything))
            logits(model, numerics)
    assert torch.equal(logits(model, Numerics("rollout", BF16)), before)
    assert (model.config._attn_implementation, getattr(model.config, "_experts_implementation", None)) == implementation


def test_another_implementation_differs_in_the_last_bits_only() -> None:
    model = tiny_model()
    pair = comparison("engine", "w4")
    assert pair is not None
    ours, reference = (logits(model, numerics) for numerics in pair)
    assert 0 < float((ours - reference).abs().max()) < 1e-5


def test_layers_are_those_with_quantised_weights() -> None:
    assert probe_numerics.layers(tiny_model()) == [0, 1]
    assert probe_numerics.layers(tiny_model("deepseek_v3")) == [1]  # its first layer is dense
