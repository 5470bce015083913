"""Verbs of suites: `quads suite list | run | report | check | render | problems`. Heavy imports happen inside them."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from quads.cli_bench import seconds
from quads.errors import GateFailedError

suite = typer.Typer(help="Compare many runs with enough power to believe: hypotheses, arms, seeds, verdicts.")

Name = Annotated[str, typer.Argument(help="A shipped suite (quads suite list), or a folder with a suite.toml.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Change a key of the TOML, such as settings.steps=20; repeatable.")
]


@suite.command("list")
def list_() -> None:
    """List the shipped suites with their questions and sizes."""
    from rich.table import Table

    from quads.suites import config

    table = Table("suite", "question", "arms", "cells", "seeds", "steps", title="Suites")
    for name in config.shipped():
        one = config.load(name)
        cells = one.cells(Path("."))
        steps = str(cells[0].compare.steps) if cells else "probe only"
        table.add_row(name, one.question, str(len(one.arms)), str(len(cells)), str(one.seeds if cells else 0), steps)
    Console().print(table)


@suite.command("run")
def run(
    name: Name,
    out: Annotated[Path | None, typer.Option(help="Result folder; the same one goes on. Default: runs/NAME.")] = None,
    budget: Annotated[str, typer.Option(help="Stop cleanly after this time: 90s, 9m, 1h; empty: no limit.")] = "",
    workers: Annotated[int, typer.Option(help="Runs side by side; 0: as many as fit.")] = 0,
    arms: Annotated[str, typer.Option(help="Only these arms, comma-separated.")] = "",
    seeds: Annotated[str, typer.Option(help="Only these seeds, such as 0-3,6.")] = "",
    probe: Annotated[str, typer.Option(help="Longest time of the probe; 0 leaves it out; empty: no limit.")] = "",
    report_to: Annotated[str, typer.Option(help="trackio or wandb, through the trainer.")] = "",
    changes: Changes = None,
) -> None:
    """Run or resume a suite, then summarise and report it. An interrupt or the budget leaves a folder that goes on."""
    from quads.suites import config, runner

    options = runner.Options(
        budget=_limit(budget), workers=workers, arms=_names(arms), seeds=_seeds(seeds), report_to=report_to,
        probe=_limit(probe),
    )  # fmt: skip
    chosen = config.load(name, _changes(changes))
    try:
        outcome = runner.run(chosen, out or Path("runs") / chosen.name, options)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if outcome.failed:
        raise GateFailedError(f"{len(outcome.failed)} runs failed: {'; '.join(sorted(outcome.failed))}")


@suite.command("report")
def report(
    out: Annotated[Path | None, typer.Argument(help="Result folder to summarise and report again.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="OLD NEW: result folders or summaries; shows what moved.")
    ] = None,
) -> None:
    """Write summary.json and report.html of a result folder, or show what moved between two."""
    console = Console()
    if compare is not None:
        from quads.suites import report_compare

        moved = report_compare.compare(*compare)
        console.print(moved.render())
        console.print(f"{moved.headline()}: {moved.write()}")
    elif out is not None:
        from quads.suites import results, runner

        found = results.load(out)
        if found.empty:
            raise ValueError(
                f"{out} holds no records (CELL/runs.jsonl, probe.jsonl, or these as .gz): nothing to report"
            )
        runner.finish(found.suite, out, console)
    else:
        raise ValueError("name a result folder, or --compare OLD NEW")


@suite.command("check")
def check(
    baseline: Annotated[Path, typer.Argument(help="summary.json, or the folder that holds it.")],
    new: Annotated[Path, typer.Argument(help="summary.json, or the folder that holds it.")],
) -> None:
    """Exit 1 with the names of what fell beyond the baseline's interval; 3 where the two cannot be compared."""
    from quads.suites import gates

    held = gates.check(baseline, new)
    Console().print(f"{len(held)} numbers hold against {baseline}")


@suite.command("render")
def render(
    name: Name,
    out: Annotated[Path, typer.Option(help="Folder for the rendered jobs.")],
    verl: Annotated[bool, typer.Option("--verl", help="As verl jobs (Ray, FSDP, vLLM): the one form there is.")] = True,
    arm: Annotated[str, typer.Option(help="Only this arm.")] = "",
    variant: Annotated[str, typer.Option(help="Only this variant or cell.")] = "",
    seed: Annotated[int | None, typer.Option(help="Only this seed.")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--option", help="model=..., nodes=..., gpus=..., place=...; repeatable.")
    ] = None,
    changes: Changes = None,
) -> None:
    """Write the runs of a suite as jobs for a cluster; prints how each is started."""
    from quads.suites import config
    from quads.suites.verl import VerlOptions
    from quads.suites.verl import render as write

    given = {key: value for key, value in _changes(options).items()}
    unknown = sorted(set(given) - set(VerlOptions.__dataclass_fields__))
    if unknown:
        raise ValueError(f"--option {unknown[0]} is unknown (known: {', '.join(VerlOptions.__dataclass_fields__)})")
    chosen = config.load(name, _changes(changes))
    for folder in write(chosen, out, arm=arm, variant=variant, seed=seed, options=VerlOptions(**given)):
        print(f"sh {folder}/run.sh")


@suite.command("problems")
def problems(
    name: Name,
    out: Annotated[Path, typer.Option(help="JSONL file to write; a run reads it with --set settings.problems=FILE.")],
    seeds: Annotated[str, typer.Option(help="Seeds to export training problems of; empty: all of the suite.")] = "",
    changes: Changes = None,
) -> None:
    """Export the problems of a suite, for a machine that cannot make them."""
    from quads.compare.tasks import Task
    from quads.suites import config

    chosen = config.load(name, _changes(changes))
    cells = chosen.cells(Path("."))
    tasks = {cell.compare.task for cell in cells}
    if len(tasks) != 1:
        raise ValueError(f"suite '{chosen.name}' asks {len(tasks)} tasks: export needs exactly one")
    one = cells[0].compare
    most = max(cell.compare.steps * cell.compare.prompts for cell in cells)
    task = Task(one.task, short=one.character, held_out=one.held_out)
    lines = task.export(out, _seeds(seeds) or tuple(range(chosen.seeds)), most)
    Console().print(f"{lines} problems in {out}")


def _limit(text: str) -> float:
    limit = seconds(text)
    return math.inf if limit is None else limit


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _seeds(text: str) -> tuple[int, ...]:
    """The seeds of "0-3,6"."""
    found: list[int] = []
    for part in _names(text):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last.isdigit() or not last)):
            raise ValueError(f"--seeds '{text}' is no list of seeds (for example 0-3,6)")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _changes(given: list[str] | None) -> dict[str, Any]:
    """Dotted keys and TOML values of `a.b=v`; what is no TOML value is text."""
    found: dict[str, Any] = {}
    for one in given or []:
        key, sign, value = one.partition("=")
        if not (key and sign):
            raise ValueError(f"'{one}' is not KEY=VALUE")
        try:
            found[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = value
    return found
