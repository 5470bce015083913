"""`quads diagnose`: load a model, diagnose it, and leave a folder with tables, a report and a stamp.

Output folder: `diagnose.json` (every table), `report.html` (self-contained), `config.json` (the resolved
configuration), `stamp.json`. All are written at the end and each at once: an interrupted run leaves what was there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from quads import models, provenance, recorded, streaming
from quads import recipes as recipe_files
from quads.attribution import Diagnosis, Plan, TokenBatch, default_recipe, diagnose_tokens, encode
from quads.attribution.diagnosis import RATIOS
from quads.attribution.layerwise import LayerScope, LayerwiseRun, decoder_layers, resident
from quads.diagnose_report import print_tables, write_html
from quads.recipes import Recipe

BATCH_TOKENS = 8192  # of recorded rollouts, padding included; what is beyond is left out and the result says so
PROMPT_SEPARATOR = "---"


@dataclass(frozen=True, kw_only=True)
class DiagnoseConfig:
    """What to diagnose.

    model: `smollm2` or a local Hugging Face folder; stream: keep one decoder layer of it in memory at a time.
    prompts: text file, prompts separated by lines of `---`, or without any, a prompt a line (None: the built-in set).
    rollouts: recorded rollouts (.jsonl or .parquet) instead of prompts; temperature: what they were sampled at.
    recipe: a recipe or .toml file that selects weights and describes a recorded rollout's numerics (empty: W4A4 of
    the routed experts, or of every decoder linear of a dense model).
    """

    out: Path
    model: str = models.SMOLLM2
    stream: bool = False
    prompts: Path | None = None
    rollouts: Path | None = None
    temperature: float = 1.0
    recipe: str = ""
    ratios: tuple[float, ...] = RATIOS
    seeds: tuple[int, ...] = (0, 1)
    max_tokens: int = 48
    isolate: bool = True

    def to_dict(self) -> dict[str, Any]:
        return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(self).items()}


@dataclass(frozen=True)
class DiagnoseResult:
    """The diagnosis, and the document that `diagnose.json` holds."""

    diagnosis: Diagnosis
    document: dict[str, Any]


def run(config: DiagnoseConfig, console: Console | None = None) -> DiagnoseResult:
    """Diagnose and write the output folder; bad input is a one-line ValueError, and nothing is written."""
    console = console or Console()
    started, cpu = time.perf_counter(), time.process_time()
    plan = Plan(ratios=config.ratios, seeds=config.seeds, isolate=config.isolate)
    prompts = None if config.rollouts else read_prompts(config.prompts)
    console.print(f"loading {config.model}")
    loaded, scope = _load(config)
    recipe = recipe_files.load(config.recipe) if config.recipe else default_recipe(loaded.model)
    batch, note = _batch(config, loaded, recipe, scope, prompts)
    console.print(f"{len(plan.everywhere())} variants on {batch.count} tokens of {len(batch.tokens)} sequences")
    with Progress(console=console, transient=True) as progress:
        scope = _tracked(scope, progress, len(decoder_layers(loaded.model)))
        diagnosis = diagnose_tokens(
            loaded.model, batch, plan=plan, recipe=recipe, scope=scope, temperature=config.temperature
        )
    document = {
        **diagnosis.to_dict(),
        "label": "emulated (CPU)",
        "model": loaded.source,
        "notes": [text for text in (loaded.note, note) if text],
        "recipe": recipe.to_dict(),
        "config": config.to_dict(),
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }
    _write(config.out, document, provenance.stamp(seeds=config.seeds))
    print_tables(document, console)
    console.print(f"report: {config.out / 'report.html'}")
    return DiagnoseResult(diagnosis, document)


def read_prompts(path: Path | None = None) -> list[str]:
    """Prompts of a text file (None: the built-in set); ValueError where it holds none."""
    if path is not None and not path.is_file():
        raise ValueError(f"prompt file {path} does not exist")
    try:
        source = path or resources.files("quads").joinpath("data/prompts.txt")
        text = source.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {path} is not UTF-8 text: {error}") from None
    lines = text.splitlines()
    if PROMPT_SEPARATOR in lines:
        parts = "\n".join(lines).split(f"\n{PROMPT_SEPARATOR}\n")
    else:
        parts = lines
    prompts = [part.strip("\n") for part in parts if part.strip()]
    if not prompts:
        raise ValueError(f"prompt file {path} holds no prompt")
    return prompts


def _load(config: DiagnoseConfig) -> tuple[models.LoadedModel, LayerScope]:
    if config.stream:
        return streaming.load(Path(config.model))
    return models.load(config.model), resident


def _batch(
    config: DiagnoseConfig, loaded: models.LoadedModel, recipe: Recipe, scope: LayerScope, prompts: list[str] | None
) -> tuple[TokenBatch, str]:
    """The token sequences, and a note where a recorded file was longer than one batch."""
    if config.rollouts is None:
        assert prompts is not None
        return encode(loaded.tokenizer, prompts, config.max_tokens), ""
    rollouts = recorded.read(config.rollouts)
    used = recorded.limit(rollouts, BATCH_TOKENS)
    batch = recorded.to_batch(used)
    reference = LayerwiseRun(loaded.model, [], recipe, [], scope=scope, temperature=config.temperature)
    recorded.check_alignment(used, batch, reference.reference(batch.tokens, batch.real))
    note = f"first {len(used)} of {len(rollouts)} recorded rollouts" if len(used) < len(rollouts) else ""
    return batch, note


def _tracked(scope: LayerScope, progress: Progress, layers: int) -> LayerScope:
    """`scope`, with every decoder layer that is done moving a progress bar: a pass goes through all of them."""
    task = progress.add_task("decoder layers", total=layers)

    @contextmanager
    def tracked(index: int) -> Iterator[None]:
        if index == 0:
            progress.reset(task)
        with scope(index):
            yield
        progress.advance(task)

    return tracked


def _write(folder: Path, document: dict[str, Any], stamp: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "stamp.json", json.dumps(stamp, indent=1, default=str))
    _replace(folder / "config.json", json.dumps(document["config"], indent=1))
    _replace(folder / "report.html", write_html(document, stamp))
    _replace(folder / "diagnose.json", json.dumps(document, indent=1))


def _replace(path: Path, text: str) -> None:
    """Write `path` at once: a reader sees the old file or the new one, never a part."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
