"""The closing table on the terminal."""

from __future__ import annotations

import math

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from quads.compare.summary import Numbers

SPEED_NOTE = "emulated numerics on CPU: not a speed claim"


def render(summary: Numbers) -> Group:
    """Two tables, a row an arm: held-out accuracy with 95 % intervals; the gap's statistics and tokens a second."""
    accuracy = _table("Held-out accuracy [95 % interval over problems]", "start", "end", "gain", "end - bf16")
    gap = _table("Gap |log p trainer - log p rollout|", "mean", "p99", "max", "k3", "ESS", "tokens", "tokens/s")
    for arm, numbers in summary["arms"].items():
        against = numbers.get("accuracy/against_bf16")
        accuracy.add_row(
            arm,
            f"{numbers['accuracy/start']['value']:.2f}",
            interval(numbers["accuracy/end"]),
            interval(numbers["accuracy/gain"], signed=True),
            interval(against, signed=True) if against else "",
        )
        gap.add_row(
            arm,
            *(f"{numbers[key]:.2g}" for key in ("gap/mean", "gap/p99", "gap/max", "gap/k3")),
            f"{numbers['gap/ess']:.4f}",
            f"{numbers['gap/tokens']:,}",
            f"{numbers['throughput/rollout_tokens_per_s']:,.0f}",
        )
    gap.caption = f"tokens/s: {SPEED_NOTE}"
    return Group(accuracy, gap)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("arm", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def interval(share: Numbers, *, signed: bool = False) -> str:
    """`0.51 [0.48 0.54]`, as narrow as a terminal of 80 columns asks."""
    sign = "+" if signed else ""
    if math.isnan(share["low"]):
        return f"{share['value']:{sign}.2f}"
    return f"{share['value']:{sign}.2f} [{share['low']:{sign}.2f} {share['high']:{sign}.2f}]"


def verdict(learned: bool | None) -> str:
    """One sentence on whether the baseline learned, which every comparison rests on."""
    if learned is None:
        return "no bf16 arm here: nothing shows that the unquantised model learns"
    if learned:
        return "bf16 learned: its held-out gain is above zero with its whole interval"
    return "bf16 did not learn (its gain's interval reaches zero): the arms say nothing about each other's accuracy"
