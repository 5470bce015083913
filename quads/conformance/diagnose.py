"""Which known fault explains the bits: every fault against every near dialect, on all that was observed.

A fault explains a kernel where a dialect with that fault gives every observed byte. The search runs on the directed
cases (with the enumeration that differs most where they agree); what survives is checked on all observations. If no
single fault does, pairs of a fault of arithmetic and one of order are tried; last, those that explain most are named.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from quads.conformance.faults import Fault, field_faults, quantizer_faults
from quads.conformance.observe import differences, questions
from quads.conformance.protocol import Protocol, Quantized
from quads.conformance.reference import Observation, Question, Reference, correct, difference
from quads.emulation import dialects
from quads.emulation.dialects import EXACT, Dialect

NEAREST = 3  # dialects besides the intended one that faults are planted in
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
    found: list[Explanation] = []
    for base in bases(nearest, target):
        asked = list(questions(small, base, protocol))
        alone = _left(asked, correct)
        for fault in (*quantizer_faults(), *field_faults(base)):
            found.append(Explanation(base.name, (fault,), _left(asked, fault.effect), alone))
    complete = [_checked(e, observed, protocol) for e in found if e.complete]
    complete = [e for e in complete if e.complete] or _pairs(found, small, observed, protocol)
    if complete:
        return _one_per_fault(complete)
    partly = [e for e in found if e.left < e.of and e.of - e.left > e.of // 10]
    return sorted(partly, key=lambda e: e.left)[:3]


def _small(observed: list[Observation], dialect: Dialect, protocol: Protocol) -> list[Observation]:
    """The directed cases; with the enumerated or generated one that differs most where they do not differ."""
    rest = [o for o in observed if o.case.group in _LAST]
    directed = [o for o in observed if o.case.group not in _LAST]
    if any(d.total for _, d in differences(directed, dialect, protocol)):
        return directed
    counts = [(d.total, index) for index, (_, d) in enumerate(differences(rest, dialect, protocol))]
    worst = [rest[max(counts)[1]]] if counts and max(counts)[0] else []
    return directed + worst


_Asked = list[tuple[Observation, Question]]


def _left(asked: _Asked, effect: Reference) -> int:
    return sum(difference(observation.answer, effect(q), q).total for observation, q in asked)


def _checked(e: Explanation, observed: list[Observation], protocol: Protocol) -> Explanation:
    """The explanation on all observations."""
    base, effect = dialects.load(e.dialect), _composed(e.faults)
    asked = list(questions(observed, base, protocol))
    return Explanation(e.dialect, e.faults, _left(asked, effect), _left(asked, correct))


def _composed(faults: tuple[Fault, ...]) -> Reference:
    if len(faults) == 1:
        return faults[0].effect
    arithmetic, order = faults

    def effect(q: Question) -> Quantized:
        return order.effect(dataclasses.replace(q, answered=arithmetic.effect(q)))

    return effect


def _pairs(
    single: list[Explanation], small: list[Observation], observed: list[Observation], protocol: Protocol
) -> list[Explanation]:
    """Arithmetic and order together, for the dialect and faults of arithmetic that leave the least scales wrong."""
    from quads.conformance.layout_effects import EFFECTS

    base_name = min(single, key=lambda e: e.left).dialect
    base = dialects.load(base_name)
    asked = list(questions(small, base, protocol))
    order = [e for e in single if e.dialect == base_name and e.faults[0].name in EFFECTS]
    order = sorted((e for e in order if e.left < e.of), key=lambda e: e.left)[:4]
    arithmetic = [e for e in single if e.dialect == base_name and e.faults[0].name not in EFFECTS]
    found = []
    for second in order:
        for first in arithmetic:
            pair = (first.faults[0], second.faults[0])
            if _left(asked, _composed(pair)) == 0:
                found.append(_checked(Explanation(base_name, pair, 0, 0), observed, protocol))
    return [e for e in found if e.complete]


def _one_per_fault(complete: list[Explanation]) -> list[Explanation]:
    """Explanations that differ only by the dialect say the same: keep the one of the fewest bytes, then the first."""
    best: dict[tuple[str, ...], Explanation] = {}
    for e in sorted(complete, key=lambda e: e.of):
        best.setdefault(tuple(fault.name for fault in e.faults), e)
    fewest = min(e.of for e in best.values())
    return [e for e in best.values() if e.of == fewest] or list(best.values())
