"""What a comparison accepts, and what two runs of one folder must agree on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from quads.compare.config import CompareConfig, CompareError, differences, digest
from quads.recipes import RecipeError


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("steps", 0, "not at least 1"),
        ("samples", 1, "at least 2 samples"),
        ("lr", 1.5, "not between 0 and 1"),
        ("lr", float("nan"), "not between 0 and 1"),
        ("dtype", "float16", "not float32 or bfloat16"),
        ("minibatches", 7, "must divide prompts"),
        ("arms", (), "is empty"),
        ("arms", ("bf16", "bf16"), "names one twice: bf16, bf16"),
        ("seeds", (1, 1), "names one twice"),
        ("seeds", (-1,), "between 0 and 999"),
    ],
)
def test_a_field_that_cannot_be_is_named_with_its_rule(field: str, value: Any, rule: str) -> None:
    with pytest.raises(CompareError, match=f"field '{field}'.*{rule}") as caught:
        CompareConfig(**{field: value})
    assert "\n" not in str(caught.value)


def test_an_unknown_arm_is_a_recipe_error_with_the_nearest_name() -> None:
    with pytest.raises(RecipeError, match="did you mean 'quads'"):
        CompareConfig(arms=("quad",))


def test_two_files_of_one_recipe_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bf16.toml").write_text("")
    with pytest.raises(CompareError, match="name one recipe twice"):
        CompareConfig(arms=("bf16", str(tmp_path / "bf16.toml")))


def test_every_field_has_a_help_text() -> None:
    assert all(field.metadata["help"].endswith(".") for field in dataclasses.fields(CompareConfig))


def test_arms_seeds_and_place_do_not_change_the_identity_and_the_rest_does() -> None:
    base = CompareConfig()
    assert CompareConfig(arms=("qat",), seeds=(4,), out=Path("elsewhere"), fresh=True).identity() == base.identity()
    for field, value in (
        ("steps", 41),
        ("lr", 2e-4),
        ("task", "x"),
        ("model", "m"),
        ("threads", 2),
        ("dtype", "bfloat16"),
    ):
        assert CompareConfig(**{field: value}).identity() != base.identity()  # type: ignore[arg-type]


def test_differences_are_dotted_keys_with_both_values() -> None:
    old = {"lr": 1, "recipe": {"a": 1, "b": 2}, "gone": 3}
    assert differences(old, {"lr": 2, "recipe": {"a": 1, "b": 5}}) == [
        "gone: 3 -> None",
        "lr: 1 -> 2",
        "recipe.b: 2 -> 5",
    ]


def test_the_digest_does_not_depend_on_key_order() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 2, "b": 1})
