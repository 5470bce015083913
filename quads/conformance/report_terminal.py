"""The report on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quads.conformance.result import CheckReport, TargetReport

_COLOUR = {"error": "red", "warning": "yellow", "note": "dim"}
NEAREST = 5


def show(report: CheckReport, console: Console, *, explain: bool = True) -> None:
    """Print each callable: verdict, findings, first failing input (with its roundings), nearest dialects."""
    for target in report.targets:
        _target(target, console, explain)
    verdict = "all conform" if report.exit_code == 0 else "not all conform"
    console.print(f"{verdict}: {sum(t.passed for t in report.targets)} of {len(report.targets)} callables")


def _target(t: TargetReport, console: Console, explain: bool) -> None:
    mark = "[bold green]pass[/]" if t.passed else "[bold red]FAIL[/]"
    console.print(f"{mark} {t.kind} [bold]{escape(t.spec)}[/]: {escape(t.headline())}", soft_wrap=True)
    for finding in t.findings:
        colour = _COLOUR[finding.level]
        console.print(
            f"  [{colour}]{finding.level} {escape(finding.rule)}[/]: {escape(finding.message)}", soft_wrap=True
        )
    if t.first:
        console.print(f"  first failing input: {escape(t.first.case)}")
        for name, value in (("input", t.first.input_hex), ("expected", t.first.expected), ("got", t.first.got)):
            console.print(f"    {name:<9}{escape(value)}", soft_wrap=True)
        if explain and t.first.explain:
            for line in t.first.explain.splitlines():
                console.print(f"    {escape(line)}", style="dim", soft_wrap=True, highlight=False)
    if not t.passed and t.candidates:
        table = Table("nearest", "differing", "detail", box=None, pad_edge=False)
        for candidate in t.candidates[:NEAREST]:
            table.add_row(candidate.name, str(candidate.differing), candidate.detail)
        console.print(table)
    console.print(f"  {t.calls} calls, {t.elements} elements, {t.seconds:.1f} s", style="dim")
