"""A suite as verl jobs: one folder for each cell, arm and seed, to be started with verl's own trainer.

Ray schedules, FSDP2 trains, vLLM samples with the quads plugin: nothing of that is ours, so a job is only settings.
`quads.suites.verl_settings` says which; docs/verl.md says what was tried and what was not.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from quads.compare.records import write_atomically
from quads.errors import CannotRunHereError
from quads.recipes import Recipe
from quads.suites.config import Cell, Suite, SuiteError
from quads.suites.verl_settings import VERSION, arguments, settings

SCRIPT = """#!/bin/sh
# What each setting is for: README.md. More overrides may follow the command.
set -eu
cd "$(dirname "$0")"
export TENSORBOARD_DIR="${{TENSORBOARD_DIR:-$PWD/tensorboard}}"
exec python -m verl.trainer.main_ppo \\
  {overrides} \\
  "$@"
"""


@dataclass(frozen=True, kw_only=True)
class VerlOptions:
    """What a suite does not say: the model, the data and the machines. `metadata["help"]` is the command line's."""

    model: str = field(
        default="Qwen/Qwen3-30B-A3B",
        metadata={"help": "Hugging Face name or folder on the cluster, where the suite names no model."},
    )
    train_files: str = field(
        default="data/dapo-math-17k.parquet", metadata={"help": "Training parquet; a relative path is below --out."}
    )
    val_files: str = field(
        default="data/aime-2024.parquet", metadata={"help": "Evaluation parquet; a relative path is below --out."}
    )
    nodes: int = field(default=1, metadata={"help": "Machines of the Ray cluster."})
    gpus: int = field(default=8, metadata={"help": "GPUs a machine."})
    tensor_parallel: int = field(default=2, metadata={"help": "GPUs a vLLM engine."})
    max_prompt_tokens: int = field(default=2048, metadata={"help": "Longest prompt; longer ones are left out."})
    place: str = field(default="", metadata={"help": "Where --out will lie on the cluster; empty: where it is here."})

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus", "tensor_parallel", "max_prompt_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise SuiteError(f"verl option '{name}' is {value!r}, not a number from 1 up")
        if self.nodes * self.gpus % self.tensor_parallel:
            raise SuiteError(
                f"verl option 'tensor_parallel' is {self.tensor_parallel}: it must divide {self.nodes * self.gpus} GPUs"
            )


@dataclass(frozen=True)
class Job:
    """One run: a cell's settings under one recipe and one seed. `folder` is relative to the rendered suite."""

    suite: str
    cell: Cell
    arm: str
    recipe: Recipe
    seed: int

    @property
    def folder(self) -> str:
        safe = "".join(c if c.isalnum() or c in "+-._=" else "_" for c in self.arm)
        return f"{self.cell.name}/{safe}-seed{self.seed}"


def render(
    suite: Suite,
    out: Path,
    *,
    arm: str = "",
    variant: str = "",
    seed: int | None = None,
    options: VerlOptions | None = None,
) -> list[Path]:
    """Write the jobs of `suite` (those of one arm, variant or cell, and seed where given) below `out`; their folders.

    SuiteError for an arm, variant or seed that the suite has not; CannotRunHereError where verl cannot do what a job
    asks for. Then nothing was written.
    """
    options = options or VerlOptions()
    jobs = list(_jobs(suite, out, arm, variant, seed))
    for job in jobs:
        _check(job)
    rendered = [(job, settings(job, options, _place(out, options))) for job in jobs]
    return [_write(out, job, values) for job, values in rendered]


def _jobs(suite: Suite, out: Path, arm: str, variant: str, seed: int | None) -> Iterator[Job]:
    cells = suite.cells(out)
    if not cells:
        raise SuiteError(f"suite {suite.name} only probes: it has no runs to render")
    named = [cell for cell in cells if cell.name == variant]
    chosen = named or [cell for cell in cells if variant in ("", cell.variant)]
    _known("variant", variant, {name for cell in cells for name in (cell.name, cell.variant)})
    _known("arm", arm, suite.arms)
    _known("seed", "" if seed is None else str(seed), [str(s) for s in range(suite.seeds)])
    for cell in chosen:
        for name, recipe in zip(suite.arms, cell.compare.recipes(), strict=True):
            if arm in ("", name):
                yield from (Job(suite.name, cell, name, recipe, s) for s in cell.compare.seeds if seed in (None, s))


def _known(what: str, name: str, known: Any) -> None:
    if name and name not in known:
        raise SuiteError(f"the suite has no {what} '{name}' (it has {', '.join(sorted(known))})")


def _check(job: Job) -> None:
    """CannotRunHereError for what verl or the plugin would leave out without a word."""
    compare = job.cell.compare
    cannot = {
        f"verl {VERSION} replays routing (R3) under Megatron and VeOmni only, and quads trains under FSDP2": compare.r3,
        "outlier channels are planted in the starts that quads ships, not in a model of verl's": compare.outliers,
        "the vLLM plugin computes rac_scope 'tile' of fused experts on a CPU only": job.recipe.rac_scope == "tile"
        and job.recipe.rac_ratio > 0,
    }
    for why, holds in cannot.items():
        if holds:
            raise CannotRunHereError(
                f"cell {job.cell.name}, arm {job.arm}: {why}; render the others with --variant or --arm"
            )
    if compare.prompts % compare.minibatches:
        raise SuiteError(
            f"cell {job.cell.name}: verl cuts minibatches of whole prompts, and minibatches = {compare.minibatches}"
            f" does not divide prompts = {compare.prompts}"
        )


def _place(out: Path, options: VerlOptions) -> str:
    return options.place.rstrip("/") or str(out.resolve())


def _write(out: Path, job: Job, values: dict[str, Any]) -> Path:
    folder = out / job.folder
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "recipe.toml": job.recipe.to_toml(),
        "job.yaml": _yaml(values),
        "run.sh": _script(values),
        "README.md": _readme(job, values),
    }
    for name, text in texts.items():
        write_atomically(folder / name, text.encode())
    os.chmod(folder / "run.sh", 0o755)
    return folder


def _yaml(values: dict[str, Any]) -> str:
    """The overrides as a flat YAML mapping."""
    head = f"# Overrides of verl {VERSION}'s ppo_trainer; a key with + is new in an open dictionary.\n"
    return head + yaml.safe_dump(values, sort_keys=False, width=1000)


def _script(values: dict[str, Any]) -> str:
    """The command: overrides as arguments, so that verl itself refuses a key that it does not know."""
    return SCRIPT.format(overrides=" \\\n  ".join(shlex.quote(argument) for argument in arguments(values)))


def _readme(job: Job, values: dict[str, Any]) -> str:
    template = resources.files("quads").joinpath("suites", "verl_readme.txt").read_text("utf-8")
    shown = {"title": f"{job.suite}: {job.cell.name}, {job.arm}, seed {job.seed}", "version": VERSION}
    keys = ("data.train_files", "data.val_files", "trainer.test_freq", "actor_rollout_ref.rollout.val_kwargs.n")
    return template.format(**shown, **{key.rpartition(".")[2]: values[key] for key in keys}, unused=_unused(job))


def _unused(job: Job) -> str:
    """Settings of the suite that a verl job has no use for, with their values."""
    local = ("task", "start", "held_out", "engine", "dtype", "compute", "threads")
    given = {f.name: getattr(job.cell.compare, f.name) for f in fields(job.cell.compare) if f.name in local}
    return ", ".join(f"{key} = {value!r}" for key, value in given.items())
