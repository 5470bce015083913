"""What a reader of a summary must be told beside its numbers: what is unfinished, left out, failed or half-written."""

from __future__ import annotations

from collections.abc import Iterator

from quads.suites.comparisons import Compared
from quads.suites.outcomes import Outcome
from quads.suites.results import Results, name_of


def lines(results: Results, ends: tuple[Outcome, ...], last: dict[str, int], compared: list[Compared]) -> Iterator[str]:
    """One line each. ends: outcomes of every arm; last: cell -> the suite's last step; compared: what is shown."""
    yield from results.noted
    yield from _unfinished(results, ends, last)
    yield from _behind(compared)
    yield from _failures(results)
    yield from _reward_errors(results)
    yield from _probed_elsewhere(results)


def _unfinished(results: Results, ends: tuple[Outcome, ...], last: dict[str, int]) -> Iterator[str]:
    have = {(end.cell, end.arm): end for end in ends}
    for cell in results.cells:
        for arm in map(name_of, results.suite.arms):
            end = have.get((cell, arm))
            finished = end.finished if end else 0
            if finished < results.suite.seeds:
                reached = f", compared at step {end.steps} over seeds {', '.join(map(str, end.seeds))}" if end else ""
                yield f"{cell}: {arm} finished {finished} of {results.suite.seeds} runs of {last[cell]} steps{reached}"


def _behind(compared: list[Compared]) -> Iterator[str]:
    found = {(c.pair.where, seed) for c in compared for seed in c.behind}
    for where, seed in sorted(found):
        yield f"{where}: seed {seed} was left out of comparisons whose other seeds were more than twice as far"


def _failures(results: Results) -> Iterator[str]:
    for cell, arms in results.cells.items():
        for run in (run for runs in arms.values() for run in runs.values()):
            if run.failure:
                why = f"step {run.failure['step']} ({run.failure['failed']})"
                yield f"{cell}: {run.arm} seed {run.seed} ended at {why}: counted as collapsed, solving nothing after"


def _reward_errors(results: Results) -> Iterator[str]:
    for cell, arms in results.cells.items():
        for arm, runs in arms.items():
            count = sum(record.get("reward/errors", 0) for run in runs.values() for record in run.steps)
            if count:
                yield f"{cell}: the reward of {arm} raised {int(count)} times; those samples scored 0"


def _probed_elsewhere(results: Results) -> Iterator[str]:
    draws = [record for arms in results.probe.values() for of in arms.values() for record in of.values()]
    for label in sorted({record["label"] for record in (*draws, *results.layers)} - {results.label}):
        yield f"records of the probe are {label}, where the rest is {results.label}"
