"""`quads export`: load a model folder, calibrate where the recipe needs it, write the packed checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from quads import models
from quads.calibration import activation_amax
from quads.export import ExportReport, export_checkpoint
from quads.recipes import load

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def run(model: Path, out: Path, recipe_name: str, convention: str, prompts: Path | None) -> ExportReport:
    """Export the model folder `model` to `out`; `prompts` is a text file with one calibration prompt a line."""
    recipe = load(recipe_name)
    loaded = models.load(model)
    amax = None
    if recipe.rollout_activations == "nvfp4":
        if prompts is None:
            raise ValueError(f"recipe '{recipe.name}' quantises activations: give --calibrate FILE")
        amax = activation_amax(loaded.model, recipe, _batches(prompts, loaded.tokenizer))
    report = export_checkpoint(loaded.model, recipe, out, convention, activation_amax=amax)
    for name in _TOKENIZER_FILES:
        if (model / name).exists():
            shutil.copy(model / name, out / name)
    return report


def _batches(prompts: Path, tokenizer: Any) -> list[Any]:
    lines = [line for line in prompts.read_text("utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{prompts} holds no prompt: a calibration needs at least one line")
    return [tokenizer(line, return_tensors="pt").input_ids for line in lines]
