"""The trainer sees Q(W) and trains the master; preparing and removing leave no trace."""

import copy

import pytest
import torch

from quads import qdq, recipes
from quads.emulation import quantizers
from quads.qat import prepare_qat, remove_qat
from quads.recipes import RecipeError
from quads.sites import find_sites
from quads.sync import export_weights, verify_sync
from tests.quads.tiny import FAMILIES, tiny_model, tokens

QUADS = recipes.named()["quads"]
ALL_LINEARS = (r"_proj$", r"\.experts\.")


def recipe_for(family: str) -> recipes.Recipe:
    return QUADS.replace(modules=ALL_LINEARS if family in ("llama", "qwen3") else QUADS.modules)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_trains_a_step_with_quantised_weights(family: str) -> None:
    model = tiny_model(family).train()
    plain = model(tokens(), labels=tokens()).loss
    names = prepare_qat(model, recipe_for(family))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    before = [site.parameter.detach().clone() for site in find_sites(model, recipe_for(family))]
    optimizer.step()
    after = [site.parameter for site in find_sites(model, recipe_for(family))]
    assert len(names) == len(before) and loss != plain
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_forward_equals_a_model_whose_weights_were_dequantised_by_hand() -> None:
    model, by_hand = tiny_model(), tiny_model()
    for site in find_sites(by_hand, QUADS):
        q = quantizers.quantize(site.weight.detach(), qdq.outer_scale(site, QUADS))
        site.parameter.data.copy_(quantizers.dequantize(q))
    prepare_qat(model, QUADS)
    assert torch.equal(model(tokens()).logits, by_hand(tokens()).logits)


def test_the_gradient_of_the_master_is_the_gradient_at_the_quantised_weight() -> None:
    model, by_hand = tiny_model(), tiny_model()
    for site in find_sites(by_hand, QUADS):
        site.parameter.data.copy_(quantizers.dequantize(quantizers.quantize(site.weight, qdq.outer_scale(site, QUADS))))
    prepare_qat(model, QUADS)
    for m in (model, by_hand):
        m(tokens(), labels=tokens()).loss.backward()
    for ours, theirs in zip(find_sites(model, QUADS), find_sites(by_hand, QUADS), strict=True):
        assert torch.equal(ours.parameter.grad, theirs.parameter.grad)


def test_straight_through_backward_multiplies_the_master_and_the_dequantised_one_does_not() -> None:
    grads = {}
    for backward in ("dequantized", "straight_through"):
        layer = torch.nn.Sequential(torch.nn.Linear(32, 16, bias=False))
        torch.manual_seed(0)
        torch.nn.init.normal_(layer[0].weight)
        master = layer[0].weight.detach().clone()
        prepare_qat(layer, QUADS.replace(modules=("^0$",), backward=backward))
        x = torch.randn(3, 32, requires_grad=True)
        layer(x).sum().backward()
        grads[backward] = (x.grad, master, layer[0].weight.detach())
    g, master, _ = grads["straight_through"]
    assert torch.equal(g, torch.ones(3, 16) @ master)
    g, master, value = grads["dequantized"]
    assert torch.equal(g, torch.ones(3, 16) @ value) and not torch.equal(value, master)


@pytest.mark.parametrize("name", ["symmetric", "trace"])
def test_symmetric_training_also_quantises_activations(name: str) -> None:
    recipe = recipes.named()[name]
    model, asymmetric = tiny_model(), tiny_model()
    prepare_qat(model, recipe)
    prepare_qat(asymmetric, recipes.named()["qat"])
    out, other = model(tokens(), labels=tokens()), asymmetric(tokens())
    out.loss.backward()
    assert not torch.equal(out.logits, other.logits)
    assert all(torch.isfinite(site.parameter.grad).all() for site in find_sites(model, recipe))


def test_removing_restores_parameters_names_and_outputs() -> None:
    model = tiny_model()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    logits = model(tokens()).logits
    prepare_qat(model, QUADS)
    remove_qat(model)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in state.items())
    assert torch.equal(model(tokens()).logits, logits)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    results = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        prepare_qat(model, QUADS)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(tokens(), labels=tokens()).loss.backward()
        results.append([site.parameter.grad for site in find_sites(model, QUADS)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_prepared_model_can_be_copied() -> None:
    model = tiny_model()
    prepare_qat(model, QUADS)
    twin = copy.deepcopy(model)
    assert torch.equal(model(tokens()).logits, twin(tokens()).logits)
    assert find_sites(twin, QUADS)[0].parameter is not find_sites(model, QUADS)[0].parameter


def test_shards_that_engines_fuse_share_one_outer_scale() -> None:
    recipe = QUADS.replace(modules=(r"[qkv]_proj$",))
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] = 9.0
    scales = {site.name.rsplit(".", 1)[1]: qdq.outer_scale(site, recipe) for site in find_sites(model, recipe)[:3]}
    assert set(scales) == {"q_proj", "k_proj", "v_proj"}
    assert {float(s) for s in scales.values()} == {float(torch.tensor(9.0) / 2688)}


def test_shards_that_share_an_outer_scale_have_one_dtype() -> None:
    model = tiny_model("llama")
    model.model.layers[1].self_attn.k_proj.bfloat16()
    with pytest.raises(RecipeError, match=r"layers\.1\.self_attn\.q_proj shares its outer scale .*bfloat16.*float32"):
        find_sites(model, QUADS.replace(modules=(r"_proj$",)))


def test_a_bf16_trainer_is_left_alone() -> None:
    model = tiny_model()
    assert prepare_qat(model, recipes.named()["nvfp4"]) == []
    assert not any("parametrizations" in name for name, _ in model.named_parameters())


def test_lora_adapters_are_merged_before_quantisation() -> None:
    peft = pytest.importorskip("peft")
    recipe = QUADS.replace(modules=(r"q_proj$",))
    base = tiny_model("llama")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    site = find_sites(model, recipe)[0]
    assert site.name == "model.layers.0.self_attn.q_proj"
    outer = qdq.outer_scale(site, recipe)
    merged = quantizers.dequantize(quantizers.quantize(site.weight.detach(), outer))
    layer = site.adapter
    unquantised = model(tokens()).logits
    prepare_qat(model, recipe)
    x = torch.randn(3, 64)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, merged))
    model(tokens(), labels=tokens()).loss.backward()
    assert layer.lora_A["default"].weight.grad.abs().sum() > 0
    remove_qat(model)
    assert torch.equal(model(tokens()).logits, unquantised)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_expert_is_named_and_the_model_left_as_found(value: float) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[2, 5, 7] = value
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.experts\.down_proj expert 2 holds NaN or Inf at \[2, 5, 7\]"
    ):
        prepare_qat(model, QUADS)
    assert [name for name, _ in model.named_parameters()] == names


def test_recipes_that_cannot_be_applied_are_refused_by_name() -> None:
    with pytest.raises(RecipeError, match=r"'modules' \['nothing'\] selects no linear layer of Qwen3MoeForCausalLM"):
        prepare_qat(tiny_model(), QUADS.replace(modules=("nothing",)))
    tied = tiny_model("llama")
    tied.lm_head.weight = tied.model.embed_tokens.weight
    with pytest.raises(RecipeError, match="lm_head, which is tied"):
        prepare_qat(tied, QUADS.replace(modules=("lm_head",)))
    odd = torch.nn.Sequential(torch.nn.Linear(24, 16))
    with pytest.raises(RecipeError, match="0, whose K = 24 is not a multiple of 16"):
        prepare_qat(odd, QUADS.replace(modules=("^0$",)))
    twice = tiny_model()
    prepare_qat(twice, QUADS)
    with pytest.raises(RecipeError, match="parametrised already"):
        prepare_qat(twice, QUADS)


def test_mixed_dtypes_train_in_their_own() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    model.model.layers[0].mlp.experts.float()
    site = find_sites(model, QUADS)
    prepare_qat(model, QUADS)
    values = [getattr(s.module, s.attribute).dtype for s in site]
    assert values == [s.parameter.dtype for s in site] and len(set(values)) == 2


@pytest.mark.parametrize(("block", "rule"), [("16x16", "six"), ("1x16", "four_over_six"), ("16x16", "four_over_six")])
def test_weight_blocks_and_rules_of_the_recipe_change_the_forward_and_stay_in_sync(block: str, rule: str) -> None:
    recipe = QUADS.replace(weight_block=block, block_rule=rule)
    model, default = tiny_model(), tiny_model()
    prepare_qat(model, recipe)
    prepare_qat(default, QUADS)
    assert not torch.equal(model(tokens()).logits, default(tokens()).logits)
    assert verify_sync(model, recipe, export_weights(model, recipe)) == 4


def test_four_over_six_lowers_the_weight_error() -> None:
    site = find_sites(tiny_model(), QUADS)[0]
    errors = []
    for rule in ("six", "four_over_six"):
        recipe = QUADS.replace(block_rule=rule)
        value = qdq.fake_quantize(site.weight.detach(), recipe, qdq.outer_scale(site, recipe))
        errors.append(float((value - site.weight.detach()).norm()))
    assert errors[1] < errors[0]


def test_the_fake_quantise_op_computes_what_packing_and_unpacking_does() -> None:
    for shape, dtype in (((32, 64), torch.float32), ((3, 16, 48), torch.bfloat16)):
        weight = torch.randn(shape).to(dtype)
        outer = (weight.abs().amax(dim=(-2, -1), keepdim=len(shape) > 2).float() / 2688).contiguous()
        packed = qdq.pack(weight, QUADS, outer)
        assert torch.equal(qdq.fake_quantize(weight, QUADS, outer), quantizers.dequantize(packed.quantized, dtype))


def test_a_compiled_model_trains_as_the_eager_one() -> None:
    eager, compiled = tiny_model("llama").train(), tiny_model("llama").train()
    recipe = QUADS.replace(modules=(r"_proj$",))
    for model in (eager, compiled):
        prepare_qat(model, recipe)
    wrapped = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for model in (eager, wrapped):
        model(tokens(), labels=tokens()).loss.backward()
    for ours, theirs in zip(find_sites(eager, recipe), find_sites(compiled, recipe), strict=True):
        torch.testing.assert_close(ours.parameter.grad, theirs.parameter.grad, rtol=1e-4, atol=1e-6)
