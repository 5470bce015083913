"""`quads compare`: every arm and seed from one start into one output folder, resumable, with a report at the end."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from quads import models, provenance
from quads.compare import engines, report, table
from quads.compare.arm import Arm, Watch
from quads.compare.config import CompareConfig, CompareError, differences
from quads.compare.policy import Policy, load_policy
from quads.compare.records import Records, write_json
from quads.compare.start import STARTS
from quads.compare.summary import Numbers, learned, summarize
from quads.compare.training import run_arm
from quads.errors import CannotRunHereError


def run(config: CompareConfig, console: Console | None = None) -> Numbers:
    """Run or resume the comparison of `config`; returns the summary that it writes.

    Writes runs.jsonl, evals.jsonl, config.json, stamp.json, summary.json and report.html under `config.out`.
    Bad input is a ValueError of one line before anything is written; KeyboardInterrupt leaves a folder to resume.
    """
    console = console or Console(stderr=True)
    arms = [Arm(config, recipe, seed) for seed in config.seeds for recipe in config.recipes()]
    torch.set_num_threads(config.threads)
    check_packages((*TRAINING, "plotly", config.report_to))
    engines.prepare(config.engine)
    check_folder(config)
    if config.model:
        models.check_folder(Path(config.model))
    claim(config)
    try:
        with _bars(console) as bars:
            policy = _start(config, bars)
            _run_arms(arms, policy, bars, console)
    except KeyboardInterrupt:
        console.print(f"stopped; every finished step is in {config.out}: the same command goes on from there")
        raise
    finally:
        summary = write_results(config.out)
    if summary["arms"]:
        console.print(table.render(summary))
        console.print(table.verdict(learned(summary)))
    console.print(f"report: {config.out / 'report.html'}")
    return summary


def write_results(folder: Path) -> Numbers:
    """Make summary.json and report.html of what `folder` holds so far."""
    with FileLock(folder / ".results.lock"):
        runs, evals = Records(folder / "runs.jsonl").read(), Records(folder / "evals.jsonl").read()
        summary = summarize(runs, evals)
        write_json(folder / "summary.json", summary)
        if runs:
            stamp, settings = _read(folder / "stamp.json"), _read(folder / "config.json")
            report.write(folder / "report.html", summary, runs, evals, stamp, settings)
    return summary


def _run_arms(arms: list[Arm], policy: Policy, bars: Progress, console: Console) -> None:
    steps = arms[0].config.steps
    whole = bars.add_task("all arms", total=steps * len(arms))
    for number, arm in enumerate(arms):
        bar = bars.add_task(arm.label, total=steps)

        def on_step(step: int, arm: Arm = arm, bar: Any = bar, number: int = number) -> None:
            bars.update(bar, completed=step)
            bars.update(whole, completed=number * steps + step)
            if bars.disable and step % arm.config.eval_every == 0:  # no terminal, no bars: a line now and then
                console.print(f"{arm.label}: step {step} of {steps}")

        run_arm(arm, policy, Watch(on_step, console.print))
        write_results(arm.config.out)


def _start(config: CompareConfig, bars: Progress) -> Policy:
    bar = bars.add_task("start policy", total=None)

    def on_step(step: int, loss: float) -> None:
        bars.update(
            bar,
            completed=step,
            total=STARTS[config.start].steps,
            description=f"fine-tuning the start (loss {loss:.3f})",
        )

    policy = load_policy(config, on_step)
    bars.update(bar, completed=1, total=1, description=f"start {policy.source}")
    return policy


TRAINING = ("trl", "datasets", "reasoning_gym")
_EXTRAS = {**dict.fromkeys(TRAINING, "'quads[rl]'"), "plotly": "'quads[report]'"}


def check_packages(wanted: Sequence[str]) -> None:
    """CannotRunHereError now rather than after the work."""
    for package in wanted:
        if package != "none" and importlib.util.find_spec(package) is None:
            remedy = _EXTRAS.get(package, package)
            raise CannotRunHereError(f"this needs {package}: python -m pip install {remedy}")


def check_folder(config: CompareConfig) -> None:
    """CompareError where `out` holds another comparison (it lists what differs) or is no folder."""
    path = config.out / "config.json"
    if config.out.exists() and not config.out.is_dir():
        raise CompareError(f"compare field 'out' is {config.out}, which is a file: name a folder")
    if not path.exists():
        return
    old, new = _read(path), _settings(config)
    shared = {name: recipe for name, recipe in old["recipes"].items() if name in new["recipes"]}
    changed = differences(old["shared"], new["shared"])
    changed += differences(shared, {name: new["recipes"][name] for name in shared}, "recipes.")
    if changed:
        raise CompareError(f"{config.out} holds another comparison ({'; '.join(changed)}): choose another --out")


def claim(config: CompareConfig) -> None:
    """Write config.json (recipes and seeds of earlier runs kept) and the stamp of this run."""
    config.out.mkdir(parents=True, exist_ok=True)
    path = config.out / "config.json"
    with FileLock(config.out / ".results.lock"):
        settings = _settings(config)
        if path.exists():
            old = _read(path)
            settings["recipes"] = {**old["recipes"], **settings["recipes"]}
            settings["seeds"] = sorted({*old["seeds"], *settings["seeds"]})
        write_json(path, settings)
        write_json(config.out / "stamp.json", _stamp(config.out / "stamp.json", settings["seeds"]))


def _stamp(path: Path, seeds: list[int]) -> dict[str, Any]:
    """The stamp of this run; `earlier` holds those of the runs before it in the same folder."""
    stamp = provenance.stamp(seeds=tuple(seeds))
    if path.exists():
        old = _read(path)
        stamp["earlier"] = [*old.pop("earlier", []), old]
    return stamp


def _settings(config: CompareConfig) -> dict[str, Any]:
    return {
        "shared": json.loads(json.dumps(config.identity())),
        "recipes": {recipe.name: recipe.to_dict() for recipe in config.recipes()},
        "seeds": list(config.seeds),
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CompareError(f"{path} cannot be read ({error}): choose another --out") from None


@contextmanager
def _bars(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        yield bars
