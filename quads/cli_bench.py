"""Verbs of the benchmark: `quads bench run | report | compare | model`. Heavy imports happen inside them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from quads.errors import GateFailedError

bench = typer.Typer(help="Measure kernels, layers and rollouts beside their peers; model other chips.")


def seconds(text: str) -> float | None:
    """Seconds of "480", "90s", "8m" or "1h"; None for an empty text."""
    if not text:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found:
        raise ValueError(f"--budget '{text}' is no time (for example 480, 90s, 8m, 1h)")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


@bench.command("run")
def run(
    out: Annotated[Path, typer.Option(help="Output folder; the same folder again goes on where it stopped.")] = Path(
        "runs/bench"
    ),
    budget: Annotated[str, typer.Option(help="Time after which no further case is begun: 90s, 8m; empty: none.")] = "",
    only: Annotated[str, typer.Option(help="Operations, comma-separated; empty: all.")] = "",
    quick: Annotated[bool, typer.Option(help="The first shape of each operation, no scaling.")] = False,
    device: Annotated[str, typer.Option(help="auto, cuda, cpu or all.")] = "auto",
    workers: Annotated[int, typer.Option(help="Processes that compile kernels beforehand on a GPU.")] = 8,
    rollout: Annotated[
        Path | None,
        typer.Option(help="vllm.json of bench/h200_vllm.py; default: run it where vLLM is and time is left."),
    ] = None,
    report: Annotated[bool, typer.Option(help="Write report.html and table.md at the end.")] = True,
) -> None:
    """Measure every case that this machine can run, check it first, and model the chips that are not here."""
    from quads.bench import run as job

    config = job.RunConfig(
        out=out, budget=seconds(budget), only=tuple(op for op in only.split(",") if op), quick=quick, device=device,
        workers=workers, report=report, rollout=rollout,
    )  # fmt: skip
    outcome = job.run(config)
    if not outcome.results and outcome.failed:
        raise GateFailedError(f"no case could be measured; {outcome.failed} failed")


@bench.command("add-rollouts")
def add_rollouts(
    folder: Annotated[Path, typer.Argument(help="Folder with results.jsonl.")],
    measured: Annotated[Path, typer.Argument(help="vllm.json of bench/h200_vllm.py.")],
) -> None:
    """Add rollouts in vLLM that were measured on their own to a folder of results."""
    from quads.bench import rollouts
    from quads.bench.results import Result, ResultsFile

    file = ResultsFile(folder)
    file.records()
    lines = list(rollouts.lines(measured))
    for line in lines:
        file.append(line)
    Console().print(f"{sum(isinstance(line, Result) for line in lines)} rollouts added to {file.path}")


@bench.command("report")
def report(folder: Annotated[Path, typer.Argument(help="Folder with results.jsonl.")]) -> None:
    """Write report.html and table.md of a folder of results."""
    from quads.bench import report as reports

    reports.write_report(folder)
    Console().print(f"{folder / 'report.html'} and {folder / 'table.md'}")


@bench.command("compare")
def compare(
    base: Annotated[Path, typer.Argument(help="Folder (or results.jsonl) of the run to compare with.")],
    new: Annotated[Path, typer.Argument(help="Folder (or results.jsonl) of the new run.")],
) -> None:
    """Exit 1 where a case became slower beyond the noise; 3 where the machines are not of one class."""
    from quads.bench import compare as comparisons

    comparison = comparisons.compare(base, new)
    Console(highlight=False).print(comparison.render())
    comparison.check()


@bench.command("model")
def model(
    out: Annotated[Path, typer.Option(help="Folder whose results.jsonl takes the predictions.")] = Path("runs/bench"),
    chips: Annotated[str, typer.Option(help="Chips, comma-separated; empty: all known ones.")] = "",
    report: Annotated[bool, typer.Option(help="Write report.html and table.md.")] = True,
) -> None:
    """Model kernels and rollouts on other chips, in the light of what the folder measured; no GPU needed."""
    from quads.bench import model as models
    from quads.bench.results import FILE, ResultsFile

    known = out if (out / FILE).exists() else None
    found = list(models.predictions(known, [chip for chip in chips.split(",") if chip]))
    out.mkdir(parents=True, exist_ok=True)
    count = ResultsFile(out).replace_modelled(found)
    Console().print(f"{count} modelled results in {out / FILE}")
    if report:
        from quads.bench import report as reports

        reports.write_report(out)
