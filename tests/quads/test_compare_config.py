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
        ("compute", "float16", "not float32 or bfloat16"),
        ("start", "large", "not ci or small or smollm2 or smollm2-moe"),
        ("report_to", "mlflow", "not none or trackio or wandb"),
        ("tis", 0.5, "neither 0"),
        ("tis", float("nan"), "neither 0"),
        ("outliers", "16x7", "not CHANNELSxSCALE"),
        ("outliers", "16", "not CHANNELSxSCALE"),
        ("checkpoint_every", 0, "not at least 1"),
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


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"engine": "vllm", "r3": True}, "field 'r3' needs the rollout's routing"),
        ({"engine": "vllm", "compute": "bfloat16"}, "field 'compute' is 'bfloat16', and engine 'vllm'"),
        ({"model": "m", "start": "small"}, "field 'start' is 'small' beside 'model'"),
    ],
)
def test_fields_that_exclude_each_other_are_named(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(CompareError, match=rule):
        CompareConfig(**fields)


def test_a_problem_file_counts_by_its_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("same")
    a, b = (CompareConfig(problems=str(tmp_path / name)).identity() for name in ("a", "b"))
    (tmp_path / "b").write_text("other")
    assert a == b != CompareConfig(problems=str(tmp_path / "b")).identity()


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
    free: dict[str, Any] = {"out": Path("elsewhere"), "fresh": True, "checkpoint_every": 25, "report_to": "trackio"}
    assert CompareConfig(arms=("qat",), seeds=(4,), **free).identity() == base.identity()
    for field, value in (
        ("steps", 41),
        ("lr", 2e-4),
        ("task", "x"),
        ("model", "m"),
        ("threads", 2),
        ("dtype", "bfloat16"),
        ("compute", "bfloat16"),
        ("tis", 2.0),
        ("r3", True),
        ("start", "small"),
        ("outliers", "8x8"),
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
