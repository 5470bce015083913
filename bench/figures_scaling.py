"""Cost as the work grows: time and energy over each axis of a shape on which several values were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from quads.bench.figures import ORDER, family, label, logarithmic, shown, symbol_of, time_of
from quads.bench.results import Result
from quads.compare.figures import color
from quads.page_choices import ChosenFigure, Spec

TOKENS = ("tokens", "M", "batch")  # keys of a shape that count tokens
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


@dataclass(frozen=True)
class Scaling:
    """Results of one operation that differ in `axis` only: the value there, and the result."""

    op: str
    axis: str
    fixed: str
    points: list[tuple[int, Result]]

    @property
    def title(self) -> str:
        return f"{self.op} over {self.axis}" + (f" ({self.fixed})" if self.fixed else "")


def scalings(results: Iterable[Result]) -> Iterator[Scaling]:
    """Every axis of a shape on which at least three values were taken; "weights" is the product of all but tokens."""
    by_op: dict[str, list[Result]] = {}
    for one in results:
        by_op.setdefault(one.op, []).append(one)
    for op in sorted(by_op, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        axes = list(dict.fromkeys(key for one in by_op[op] for key in one.shape))
        for axis in (*axes, "weights"):
            yield from _along(op, axis, by_op[op])


def _along(op: str, axis: str, rows: list[Result]) -> Iterator[Scaling]:
    groups: dict[str, list[tuple[int, Result]]] = {}
    for one in rows:
        varied = {axis} if axis in one.shape else set(one.shape) - set(TOKENS) if axis == "weights" else set()
        value = 1
        for key in varied:
            value *= one.shape[key]
        fixed = {key: size for key, size in one.shape.items() if key not in varied}
        if varied and (axis != "weights" or len(varied) > 1):
            groups.setdefault(shown(fixed), []).append((value, one))
    for fixed_text, points in groups.items():
        if len({value for value, _ in points}) >= 3:
            yield Scaling(op, axis, fixed_text, points)


def scaling(results: Sequence[Result]) -> ChosenFigure:
    """Time over one axis of the chosen operation's shape."""
    found = list(scalings(one for one in results if one.op != "ceiling"))
    return ChosenFigure(
        name="scaling",
        title="Cost as the work grows",
        note="Time of a call among others where that was measured, else alone. Both axes logarithmic.",
        specs={one.title: lines(one, lambda r: 1e6 * time_of(r), "microseconds") for one in found},
        by=("scaling",),
    )


def lines(along: Scaling, value: Callable[[Result], float], y: str) -> Spec:
    """A line a case: numerics give the colour, the implementation the dash, the variant the symbol."""
    data = []
    names = list(dict.fromkeys(label(one) for _, one in along.points))
    implementations = list(dict.fromkeys(one.implementation for _, one in along.points))
    for name in names:
        own = sorted(((x, one) for x, one in along.points if label(one) == name), key=lambda pair: pair[0])
        first = own[0][1]
        dash = DASHES[implementations.index(first.implementation) % len(DASHES)]
        symbol = symbol_of(first, [one for _, one in along.points])
        data.append({
            "type": "scatter", "mode": "lines+markers", "name": name, "legendgroup": family(first.numerics),
            "x": [x for x, _ in own], "y": [value(one) for _, one in own],
            "line": {"color": color(family(first.numerics)), "dash": dash, "width": 2},
            "marker": {"symbol": symbol, "size": 7},
        })  # fmt: skip
    return {"data": data, "layout": logarithmic(along.axis, y, data)}


def energy(results: Sequence[Result]) -> ChosenFigure:
    """Joules a token, from the GPU's own counter while calls ran in a row."""
    counted = [one for one in results if one.energy_j and tokens(one)]
    found = list(scalings(counted))
    return ChosenFigure(
        name="energy",
        title="Energy of a token",
        note="Energy that the GPU's counter gave for a call, over its tokens: the board's whole power, idle share too.",
        specs={
            one.title: lines(one, lambda r: 1e3 * (r.energy_j or 0.0) / tokens(r), "millijoules a token")
            for one in found
        },
        by=("energy",),
    )


def tokens(result: Result) -> int:
    """Tokens of a call; 0 where its shape has none."""
    if result.op == "rollout":
        return result.shape["batch"] * result.shape["tokens_out"]
    return next((result.shape[key] for key in TOKENS if key in result.shape), 0)
