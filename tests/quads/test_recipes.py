"""Recipes are data: they round-trip through TOML, and a bad field is one line that names it."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quads import recipes
from quads.recipes import Recipe, RecipeError


@pytest.mark.parametrize("name", recipes.named())
def test_every_named_recipe_round_trips_through_toml(name: str) -> None:
    recipe = recipes.named()[name]
    assert recipes.from_dict(tomllib.loads(recipe.to_toml())) == recipe


@given(
    ratio=st.floats(0, 1),
    scope=st.sampled_from(["token", "tile", "batch", "static", "random"]),
    patterns=st.lists(st.text(min_size=1).filter(lambda s: s.isprintable()), min_size=1, max_size=3),
)
def test_any_valid_recipe_round_trips_through_toml(ratio: float, scope: str, patterns: list[str]) -> None:
    import re

    escaped = tuple(re.escape(p) for p in patterns)
    recipe = recipes.named()["quads"].replace(rac_ratio=ratio, rac_scope=scope, modules=escaped)
    assert recipes.from_dict(tomllib.loads(recipe.to_toml())) == recipe


def test_the_issue_names_exist_and_say_what_they_should() -> None:
    named = recipes.named()
    assert {"bf16", "fp8", "nvfp4", "qat", "rac", "quads"} <= set(named)
    quads = named["quads"]
    assert (quads.train_weights, quads.train_activations) == ("nvfp4", "bf16")  # asymmetric
    assert (quads.rollout_weights, quads.rollout_activations, quads.rac_ratio) == ("nvfp4", "nvfp4", 0.5)
    assert named["nvfp4"].train_weights == "bf16" and named["nvfp4"].rac_ratio == 0


@pytest.mark.parametrize(
    ("fields", "named_field"),
    [
        ({"rac_ration": 0.5}, "did you mean 'rac_ratio'"),
        ({"colour": "red"}, "'colour' is unknown"),
        ({"rac_ratio": 0.5}, "'rac_ratio' needs rollout_weights"),
        ({"rac_ratio": 1.5}, "'rac_ratio' 1.5 is not between"),
        ({"rac_ratio": "half"}, "'rac_ratio' is 'half'"),
        ({"rac_ratio": float("nan")}, "'rac_ratio' is nan"),
        ({"rac_refresh": True}, "'rac_refresh' is True"),
        ({"rac_refresh": 0}, "'rac_refresh' 0 is not a positive"),
        ({"rollout_weights": "int4"}, "'rollout_weights' 'int4' is not one of"),
        ({"rollout_activations": "nvfp4"}, "'rollout_activations' 'nvfp4' needs"),
        ({"rollout_activations": "fp8"}, "'rollout_activations' 'fp8' goes"),
        ({"train_weights": "nvfp4"}, "'train_weights' 'nvfp4' needs"),
        ({"rollout_weights": "nvfp4", "train_activations": "nvfp4"}, "'train_activations' 'nvfp4' needs"),
        ({"block_rule": "four_over_six"}, "'block_rule' needs"),
        ({"modules": []}, "'modules' is empty"),
        ({"modules": ["("]}, "'modules' holds '\\('"),
        ({"exclude": [3]}, "'exclude' is \\[3\\]"),
    ],
)
def test_a_bad_field_is_one_line_that_names_it(fields: dict, named_field: str) -> None:
    with pytest.raises(RecipeError, match=named_field) as caught:
        recipes.from_dict(fields)
    assert "\n" not in str(caught.value)


def test_scope_all_contradicts_a_partial_ratio() -> None:
    with pytest.raises(RecipeError, match="'rac_scope' 'all'"):
        recipes.named()["quads"].replace(rac_scope="all")


def test_load_names_the_nearest_recipe_and_refuses_a_broken_file(tmp_path) -> None:
    with pytest.raises(RecipeError, match="did you mean 'quads'"):
        recipes.load("quad")
    with pytest.raises(RecipeError, match="does not exist"):
        recipes.load(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("rac_ratio = ")
    with pytest.raises(RecipeError, match="is not TOML"):
        recipes.load(tmp_path / "broken.toml")
    (tmp_path / "mine.toml").write_text('rollout_weights = "nvfp4"\n')
    assert recipes.load(tmp_path / "mine.toml") == Recipe(name="mine", rollout_weights="nvfp4")


def test_default_modules_are_the_routed_experts_only() -> None:
    selects = recipes.named()["quads"].selects
    assert selects("model.layers.0.mlp.experts.gate_up_proj")
    assert selects("model.layers.0.mlp.experts.3.down_proj")
    for name in (
        "model.layers.0.mlp.gate",
        "lm_head",
        "model.layers.0.self_attn.q_proj",
        "m.mlp.shared_experts.up_proj",
    ):
        assert not selects(name)


@pytest.mark.parametrize(("ratio", "k", "blocks"), [(0, 64, 0), (0.125, 64, 1), (0.5, 64, 2), (1, 64, 4), (0.5, 48, 2)])
def test_the_ratio_is_rounded_up_to_whole_blocks(ratio: float, k: int, blocks: int) -> None:
    assert recipes.named()["quads"].replace(rac_ratio=ratio).rac_blocks(k) == blocks


def test_the_block_of_a_recipe_is_the_quantisers() -> None:
    from quads.emulation import quantizers

    assert recipes.BLOCK == quantizers.BLOCK


def test_a_changed_recipe_is_written_as_its_base_and_its_changes() -> None:
    changed = recipes.load("quads:rac_ratio=0.25:rac_scope=token")
    assert changed == recipes.named()["quads"].replace(name=changed.name, rac_ratio=0.25, rac_scope="token")
    assert changed.name == "quads:rac_ratio=0.25:rac_scope=token"


@pytest.mark.parametrize("source", ["quads:rac_ration=0.25", "quads:rac_ratio", "nothing:rac_ratio=0.25"])
def test_a_change_that_cannot_be_is_refused(source: str) -> None:
    with pytest.raises(RecipeError):
        recipes.load(source)
