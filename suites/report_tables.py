"""A suite's numbers as tables of text, for the HTML report and for Markdown alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from quads.compare.config import CompareConfig
from quads.suites.collapse import RULE
from quads.suites.report_numbers import DASH, interval, number

Numbers = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Cells of text; the first of a row names it."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


RULES = {  # of quads.suites.collapse, in words
    "reward": f"reward {RULE.drop:g} below its best, {RULE.window} steps in a row",
    "gap": f"mean gap above {RULE.gap:g}, {RULE.window} steps in a row",
    "accuracy": f"accuracy {RULE.drop:g} below its best, {RULE.evaluations} evaluations in a row",
}


def _collapsed(row: Numbers) -> str:
    fallen = len({entry["seed"] for entry in row["collapsed"]})
    return f"{fallen} of {max(len(row['seeds']), row['finished'], fallen)}" if fallen else "none"


def evaluated(summary: Numbers, row: Numbers) -> int | None:
    """Step of the last evaluation that every seed of the arm reached; None where there is none."""
    key = (row["cell"], row["arm"])
    steps = [step for curve in summary["curves"] if (curve["cell"], curve["arm"]) == key
             for step in curve["accuracy"]["steps"]]  # fmt: skip
    return max(steps, default=None)


def trained_accuracy(summary: Numbers, row: Numbers) -> Numbers | None:
    """The arm's accuracy as rolled out after training; None where it was evaluated at its start alone."""
    return row["accuracy"] if evaluated(summary, row) != 0 else None


def _accuracy(summary: Numbers, row: Numbers) -> str:
    """Accuracy after training, with the step where other arms of the cell were evaluated at another."""
    step = evaluated(summary, row)
    others = {evaluated(summary, other) for other in summary["outcomes"] if other["cell"] == row["cell"]}
    text = interval(trained_accuracy(summary, row))
    return f"{text[:-1]}, step {step})" if len(others) > 1 and text.endswith(")") else text


_OUTCOMES: tuple[tuple[str, Callable[[Numbers], str]], ...] = (
    ("seeds compared", lambda row: number(len(row["seeds"]))),
    ("gap, reward and speed up to step", lambda row: number(row["steps"])),
    ("runs at the suite's last step", lambda row: number(row["finished"])),
    ("accuracy, as rolled out", lambda row: interval(row["accuracy"])),
    ("accuracy, same weights in BF16", lambda row: interval(row["trainer_accuracy"])),
    ("reward, last fifth", lambda row: interval(row["reward_last"])),
    ("collapsed seeds", _collapsed),
    ("gap, mean", lambda row: interval(row["gap_mean"])),
    ("gap, first fifth", lambda row: interval(row["gap_first"])),
    ("gap, last fifth", lambda row: interval(row["gap_last"])),
    ("gap, 99th percentile", lambda row: interval(row["gap_p99"])),
    ("gap, largest", lambda row: number(row["gap_max"])),
    ("k3 (KL rollout ‖ trainer)", lambda row: number(row["k3"])),
    ("effective sample size, 1 without gap", lambda row: number(row["ess"])),
    ("tokens that the gap rests on", lambda row: number(row["gap_tokens"])),
    ("rollout tokens/s", lambda row: number(row["rollout_tokens_per_s"])),
    ("tokens/s of the whole step", lambda row: number(row["step_tokens_per_s"])),
    ("peak memory, GiB", lambda row: number(row.get("memory_gib"))),
)
_EVALUATED = 3  # where the step of the evaluations stands among them: before the accuracies
_OVERVIEWS: tuple[tuple[str, Callable[[Numbers, Numbers], str]], ...] = (
    ("Held-out accuracy after training, as rolled out", _accuracy),
    ("Mean gap during training", lambda _, row: interval(row["gap_mean"])),
    ("Collapsed seeds", lambda _, row: _collapsed(row)),
)


OVERVIEWS = [(title, title) for title, _ in _OVERVIEWS]


def cells(summary: Numbers) -> list[str]:
    """Names of the cells that have outcomes, in order."""
    return list(dict.fromkeys(row["cell"] for row in summary["outcomes"]))


def outcomes(summary: Numbers, cell: str) -> Table:
    """A row a metric, a column an arm; rows that nothing was measured for are left out."""
    rows = [row for row in summary["outcomes"] if row["cell"] == cell]
    lines = [(label, *(text(row) for row in rows)) for label, text in _OUTCOMES]
    lines.insert(_EVALUATED, ("accuracy of step", *(number(evaluated(summary, row)) for row in rows)))
    return Table(("", *(row["arm"] for row in rows)), [line for line in lines if set(line[1:]) != {DASH}])


def overviews(summary: Numbers) -> list[tuple[str, Table]]:
    """Titled tables of cells by arms."""
    arms = list(dict.fromkeys(row["arm"] for row in summary["outcomes"]))
    found = {(row["cell"], row["arm"]): row for row in summary["outcomes"]}
    return [
        (
            title,
            Table(
                ("cell", *arms),
                [
                    (cell, *(text(summary, found[cell, arm]) if (cell, arm) in found else DASH for arm in arms))
                    for cell in cells(summary)
                ],
            ),
        )
        for title, text in _OVERVIEWS
    ]


def comparisons(rows: Sequence[Numbers], words: Numbers) -> Table:
    """Paired differences with interval, minimum detectable difference and pairs."""
    return Table(
        ("what", "arms", "difference (95 % interval)", "detectable", "pairs"),
        [
            (
                words["metrics"].get(row["metric"], row["metric"]),
                versus(row),
                interval(row, signed=True, name="difference"),
                number(row["mde"]),
                number(row["pairs"]),
            )
            for row in rows
        ],
    )


def versus(row: Numbers) -> str:
    """`arm − rival`, the mean of several rivals, and the places where these are two (`where` is `A : B`)."""
    first, _, second = row.get("where", "").partition(" : ")
    rivals = row["against"].split(" + ")
    rival = rivals[0] if len(rivals) == 1 else f"mean of {', '.join(rivals)}"
    return f"{row['arm']} in {first} − {rival} in {second}" if second else f"{row['arm']} − {rival}"


def by_place(rows: Sequence[Numbers]) -> list[tuple[Numbers | None, list[Numbers]]]:
    """The probe's comparisons by place, as its selectors have it; those of two places have None."""
    found: dict[str, list[Numbers]] = {}
    for row in rows:
        found.setdefault("" if " : " in row["where"] else row["where"], []).append(row)
    return [(_place(where) if where else None, rows) for where, rows in found.items()]


def _place(where: str) -> Numbers:
    """policy, outliers and reference of "POLICY[/OUTLIERS]/REFERENCE"."""
    policy, *outliers, reference = where.split("/")
    return {"policy": policy, "outliers": "/".join(outliers), "reference": reference}


def probe(rows: Sequence[Numbers]) -> Table:
    """A row an arm, of one reference, policy and outliers."""
    return Table(
        ("arm", "gap, mean", "99th percentile", "largest", "KL", "router flips", "tokens", "draws"),
        [
            (
                row["arm"],
                interval(row["gap_mean"]),
                _point(row["gap_p99"]),
                _point(row["gap_max"]),
                interval(row["kl"]),
                interval(row["router_flips"]),
                number(row["tokens"]),
                number(row["draws"]),
            )
            for row in rows
        ],
    )


def collapses(summary: Numbers) -> Table:
    """A row a collapsed seed."""
    return Table(
        ("cell", "arm", "seed", "step", "rule"),
        [
            (row["cell"], row["arm"], str(entry["seed"]), str(entry["step"]), RULES.get(entry["rule"], entry["rule"]))
            for row in summary["outcomes"]
            for entry in row["collapsed"]
        ],
    )


def learned_line(entry: Numbers) -> str:
    """One sentence on whether BF16 learned in a cell, which everything else of the cell rests on."""
    gain = interval(entry["gain"], signed=True)
    if entry["learned"]:
        return f"BF16 learned: its held-out accuracy rose by {gain}."
    if entry["learned"] is None:
        return "No trained bf16 arm here: nothing shows that the unquantised model learns."
    return f"BF16 did not learn (gain {gain}): this cell says nothing about accuracy."


def about(cell: str, suite: Numbers) -> str:
    """What sets a cell apart and what its author expected: `lr = 0.0003; corrections tis. Expected: ...`"""
    for variant in suite.get("variants", []):
        if cell == variant["name"] or cell.startswith(f"{variant['name']}+"):
            parts = [f"{key} = {value}" for key, value in variant["settings"].items()]
            corrections = cell.removeprefix(variant["name"]).strip("+")
            parts += [f"corrections: {corrections.replace('+', ', ')}"] if corrections else []
            expected = f" Expected: {variant['expect']}." if variant["expect"] else ""
            return f"{'; '.join(parts)}.{expected}" if parts else expected.strip()
    return ""


_RUN = {
    "task": "task {}",
    "start": "start model {}",
    "model": "model {}",
    "steps": "{} steps",
    "prompts": "{} prompts a step",
    "samples": "{} samples a prompt",
    "lr": "learning rate {}",
    "held_out": "{} held-out problems",
    "compute": "computed in {}",
    "engine": "rollout engine {}",
}


def run_line(summary: Numbers, suite: Numbers) -> str:
    """The settings of every cell that a reader needs first, in words; what a suite leaves alone is quads.compare's."""
    defaults = {field.name: field.default for field in fields(CompareConfig)}
    settings = {**defaults, **summary["settings"]}
    varied = {key for variant in suite.get("variants", []) for key in variant["settings"]}
    return ", ".join(
        words.format(settings[key]) for key, words in _RUN.items() if settings.get(key) and key not in varied
    )


def is_text(cell: str) -> bool:
    """Whether a cell holds words rather than a number, and reads better from the left."""
    return len(cell) > 40 or (" " in cell and cell[0].isalpha())


def _point(value: Any) -> str:
    return interval(value) if isinstance(value, dict) else number(value)
