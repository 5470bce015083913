"""Which known fault explains the bits: every fault against every near dialect, on all that was observed.

A fault explains a kernel where a dialect with that fault gives every observed byte. The search runs on the directed
cases (with the enumeration that differs most where they agree); what survives is checked on all observations. If no
single fault does, pairs of a fault of arithmetic and one of order are tried; last, those that explain most are named.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from quads.conformance import layout_effects
from quads.conformance.faults import Fault, field_faults, quantizer_faults
from quads.conformance.observe import differences, questions
from quads.conformance.protocol import Protocol, Quantized
from quads.conformance.reference import Observation, Question, Reference, correct, difference
from quads.emulation import dialects
from quads.emulation.dialects import EXACT, Dialect

NEAREST = 3  # dialects besides the intended one that faults are planted in
ORDERS = 4  # faults of order that are combined with faults of arithmetic
_LAST = {"enumeration", "generated"}


@dataclass(frozen=True)
class Explanation:
    """A dialect with these faults gives the bytes, but for `left` of the `of` that differ from the dialect alone."""

    dialect: str
    faults: tuple[Fault, ...]
    left: int
    of: int

    @property
    def complete(self) -> bool:
        return self.left == 0

    def sentence(self) -> str:
        what = " and ".join(f"{fault.name}: {fault.summary}" for fault in self.faults)
        share = "all" if self.complete else f"{self.of - self.left} of"
        return f"dialect {self.dialect} with {what} ({share} {self.of} differing bytes; {self.faults[0].evidence})"


def bases(nearest: list[str], target: str | None) -> list[Dialect]:
    """Dialects that faults are planted in: the intended one, or `exact` and the nearest."""
    names = [target] if target else [*nearest[:NEAREST], EXACT.name]
    return [dialects.load(name) for name in dict.fromkeys(names)]


def explain(
    observed: list[Observation], nearest: list[str], protocol: Protocol, target: str | None = None
) -> list[Explanation]:
    """Explanations, complete ones first and the simplest of them only; else the three that leave least."""
    small = _small(observed, dialects.load(target or nearest[0]), protocol)
    asked = {base: _failing_first(list(questions(small, base, protocol))) for base in bases(nearest, target)}
    tried = [(base, fault) for base in asked for fault in (*quantizer_faults(), *field_faults(base))]
    single = [(base, (fault,)) for base, fault in tried if _explains(asked[base], fault.effect)]
    complete = [e for e in (_checked(*found, observed, protocol) for found in single) if e.complete]
    if complete:
        return _one_per_fault(complete)
    alone = {base: _left(cases, correct) for base, cases in asked.items()}
    partly = [Explanation(base.name, (f,), _left(asked[base], f.effect), alone[base]) for base, f in tried]
    partly.sort(key=lambda e: e.left)
    complete = _pairs(partly, asked, observed, protocol)
    return _one_per_fault(complete) or [e for e in partly if e.of - e.left > e.of // 10][:3]


_Asked = list[tuple[Observation, Question]]


def _failing_first(asked: _Asked) -> _Asked:
    """Cases that differ from the plain dialect first: a wrong hypothesis fails on them at once."""
    return sorted(asked, key=lambda item: difference(item[0].answer, correct(item[1]), item[1]).total == 0)


def _explains(asked: _Asked, effect: Reference) -> bool:
    return all(difference(observation.answer, effect(q), q).total == 0 for observation, q in asked)


def _left(asked: _Asked, effect: Reference) -> int:
    return sum(difference(observation.answer, effect(q), q).total for observation, q in asked)


def _small(observed: list[Observation], dialect: Dialect, protocol: Protocol) -> list[Observation]:
    """The directed cases; with the enumerated or generated one that differs most where they do not differ."""
    rest = [o for o in observed if o.case.group in _LAST]
    directed = [o for o in observed if o.case.group not in _LAST]
    if any(d.total for _, d in differences(directed, dialect, protocol)):
        return directed
    counts = [(d.total, index) for index, (_, d) in enumerate(differences(rest, dialect, protocol))]
    worst = [rest[max(counts)[1]]] if counts and max(counts)[0] else []
    return directed + worst


def _checked(base: Dialect, faults: tuple[Fault, ...], observed: list[Observation], protocol: Protocol) -> Explanation:
    """The explanation on all observations."""
    asked = list(questions(observed, base, protocol))
    return Explanation(base.name, faults, _left(asked, _composed(faults)), _left(asked, correct))


def _composed(faults: tuple[Fault, ...]) -> Reference:
    if len(faults) == 1:
        return faults[0].effect
    arithmetic, order = faults

    def effect(q: Question) -> Quantized:
        return order.effect(dataclasses.replace(q, answered=arithmetic.effect(q)))

    return effect


def _pairs(
    partly: list[Explanation], asked: dict[Dialect, _Asked], observed: list[Observation], protocol: Protocol
) -> list[Explanation]:
    """Arithmetic and order together, in the dialect that a single fault explains best."""
    base = dialects.load(partly[0].dialect)
    here = [e.faults[0] for e in partly if e.dialect == base.name]
    order = [e.faults[0] for e in partly if e.dialect == base.name and e.left < e.of]
    order = [fault for fault in order if fault.name in layout_effects.EFFECTS][:ORDERS]
    pairs = [(first, second) for second in order for first in here if first.name not in layout_effects.EFFECTS]
    found = [pair for pair in pairs if _explains(asked[base], _composed(pair))]
    return [e for e in (_checked(base, pair, observed, protocol) for pair in found) if e.complete]


def _one_per_fault(complete: list[Explanation]) -> list[Explanation]:
    """Explanations that differ only by the dialect say the same: keep the one of the fewest bytes, then the first."""
    if not complete:
        return []
    best: dict[tuple[str, ...], Explanation] = {}
    for e in sorted(complete, key=lambda e: e.of):
        best.setdefault(tuple(fault.name for fault in e.faults), e)
    fewest = min(e.of for e in best.values())
    return [e for e in best.values() if e.of == fewest] or list(best.values())
