"""Time the quantisers with other tile shapes: module constants changed for the duration, bytes checked each time.

    python -m quads.bench.tune OUT        # appends to OUT/results.jsonl; the constants' values stand in the variant

For whoever works on the kernels; `quads bench run` measures them as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from quads import provenance
from quads.bench.cases import Case, Group, Ready, catalogue
from quads.bench.measure import Ceilings, measure
from quads.bench.monitor import Monitor
from quads.bench.results import Result, ResultsFile
from quads.kernels import compensate, fake_quant, quantize

Settings = dict[str, int]


@dataclass(frozen=True)
class Plan:
    """A case (operation, variant), the module whose constants change, their names, and the values to try."""

    op: str
    variant: str
    module: ModuleType
    constants: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]


_TILE, _LANES = ("_TILE", "_BLOCKS_A_THREAD"), ("_LANES", "_BLOCKS_A_THREAD")
PLANS = (
    Plan("quantize", "tensor", quantize, _TILE, ((128, 4), (256, 2), (512, 4), (512, 8))),
    Plan("quantize", "token", quantize, _TILE, ((512, 4),)),
    Plan("quantize_rac", "50 % static", compensate, _LANES, ((64, 1), (128, 2), (256, 2))),
    Plan(
        "quantize_rac", "50 % batch", compensate, ("_ROWS_A_PROGRAM", *_LANES),
        ((4, 128, 1), (8, 128, 1), (32, 128, 1), (8, 64, 1)),
    ),
    Plan("fake_quantize", "", fake_quant, _LANES, ((64, 1), (128, 2), (256, 2))),
    Plan("fake_quantize", "16x16", fake_quant, _LANES, ((256, 2), (256, 1))),
)  # fmt: skip


@contextmanager
def applied(module: ModuleType, settings: Settings) -> Iterator[None]:
    """Module constants changed for the duration. AttributeError where one does not exist."""
    before = {name: getattr(module, name) for name in settings}
    for name, value in settings.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def tuned(case: Case, plan: Plan, values: tuple[int, ...]) -> Case:
    """`case` whose calls, check included, run with the constants changed."""
    settings = dict(zip(plan.constants, values, strict=True))

    def ready(inputs: object) -> Ready:
        made = case.ready(inputs)
        call, check = made.calls[0], made.check

        def changed() -> object:
            with applied(plan.module, settings):
                return call()

        def checked() -> float:
            with applied(plan.module, settings):
                return check() if check else 0.0

        return replace(made, calls=[changed], check=checked)

    name = f"{case.variant} [{'/'.join(map(str, values))}]".strip()
    return replace(case, variant=name, ready=ready)


def groups(base: Iterator[Group]) -> Iterator[Group]:
    """The plan's groups at the first shape, the unchanged case first."""
    first = {g.op: g for g in base if g.quick}
    for plan in PLANS:
        group = first[plan.op]
        case = next(c for c in group.cases if c.variant == plan.variant and c.implementation == "quads.kernels")
        yield replace(group, cases=(case, *(tuned(case, plan, values) for values in plan.values)))


def main(out: Path) -> None:
    """Measure and print."""
    out.mkdir(parents=True, exist_ok=True)
    file = ResultsFile(out)
    file.append({"kind": "stamp", **provenance.stamp(), "stamp": "tune"})
    with Monitor.here() as monitor:
        for group in groups(catalogue("cuda")):
            for line in measure(group, monitor, Ceilings(), "tune"):
                file.append(line)
                if isinstance(line, Result):
                    ratio = f"{line.against.ratio:5.2f}x" if line.against else "      "
                    print(f"{line.seconds * 1e6:9.1f} us {ratio}  {line.case}", flush=True)
                else:
                    print(line, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
