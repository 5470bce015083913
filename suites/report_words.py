"""The report's words as data: glossary, names of arms and metrics, and the paper's figures (report_words.toml)."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib import resources
from typing import Any

from quads import recipes


@lru_cache(maxsize=1)
def words() -> dict[str, Any]:
    """Tables `terms`, `arms`, `metrics`, `sources` and the list `paper`."""
    return tomllib.loads(resources.files("quads").joinpath("suites", "report_words.toml").read_text("utf-8"))


def meaning(arm: str) -> str:
    """What an arm does, in plain words; a changed recipe is its base with the changes."""
    base, _, changes = arm.partition(":")
    known = words()["arms"].get(base)
    if known is None:
        return _spelled_out(arm)
    return f"as {base}, with {changes.replace(':', ', ').replace('=', ' = ')}" if changes else known


def _spelled_out(arm: str) -> str:
    try:
        recipe = recipes.load(arm)
    except recipes.RecipeError:
        return "a recipe of this suite's own"
    return (
        f"rollout {recipe.rollout_weights}/{recipe.rollout_activations} (weights/activations), trainer "
        f"{recipe.train_weights}/{recipe.train_activations}, RAC {100 * recipe.rac_ratio:g} %"
    )
