"""Running a quantiser over the cases, and counting how far each dialect is from what it answered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from quads.conformance import cases
from quads.conformance.calls import Violation
from quads.conformance.cases import QuantCase
from quads.conformance.protocol import DTYPES, Protocol
from quads.conformance.reference import (
    Difference,
    Observation,
    Question,
    Reference,
    applies,
    correct,
    difference,
    given_outer,
    question,
)
from quads.conformance.runner import Runner
from quads.emulation import dialects
from quads.emulation.dialects import EXACT, Dialect


@dataclass
class Log:
    """What came back: observations, and the broken rules with the case that broke them."""

    observed: list[Observation] = field(default_factory=list)
    violations: list[tuple[str, Violation]] = field(default_factory=list)
    calls: int = 0
    elements: int = 0


@dataclass(frozen=True)
class Tally:
    """A dialect against all that was observed."""

    dialect: str
    codes: int
    scales: int
    padding: int
    outer: int
    cases: int
    compared: int

    @property
    def total(self) -> int:
        return self.codes + self.scales + self.padding + self.outer


def first_cases(protocol: Protocol, target: Dialect | None, amaxes: int) -> Iterator[QuantCase]:
    """Directed cases of every dtype, and the first enumerations."""
    for name in protocol.dtypes:
        yield from cases.directed(protocol, DTYPES[name])
        for amax in cases.amaxes(amaxes):
            yield cases.enumeration(amax, target or EXACT, protocol, DTYPES[name])


def observe(runner: Runner, todo: Iterable[QuantCase], log: Log) -> None:
    """Call the quantiser on each case; a call without an answer is a violation and the next case goes on."""
    for case in todo:
        given = given_outer(case, runner.protocol)
        outcome = runner.call("quantizer", (case.x, given))
        log.calls += 1
        log.elements += case.x.numel()
        log.violations += [(case.name, violation) for violation in outcome.violations]
        if outcome.value is not None:
            log.observed.append(Observation(case, given, outcome.value))
        if sum(violation.rule == "hangs" for _, violation in log.violations) >= 3:
            break  # a kernel that always hangs would take the whole time limit for each case


def differences(
    observed: Iterable[Observation], dialect: Dialect, protocol: Protocol, reference: Reference = correct
) -> Iterator[tuple[Observation, Difference]]:
    """Each observation that `dialect` defines an answer to, with its difference from `reference`."""
    for observation, asked in questions(observed, dialect, protocol):
        yield observation, difference(observation.answer, reference(asked), asked)


def questions(
    observed: Iterable[Observation], dialect: Dialect, protocol: Protocol
) -> Iterator[tuple[Observation, Question]]:
    """Each observation that `dialect` defines an answer to, as the dialect sees it."""
    for observation in observed:
        if applies(observation.case, dialect, protocol):
            yield observation, question(observation, dialect, protocol)


def tally(observed: Iterable[Observation], dialect: Dialect, protocol: Protocol) -> Tally:
    """Count the differences from `dialect`."""
    codes = scales = padding = outer = bad = compared = 0
    for _, d in differences(observed, dialect, protocol):
        codes, scales = codes + int(d.codes.sum()), scales + int(d.scales.sum())
        padding, outer, bad, compared = padding + d.padding, outer + d.outer, bad + (d.total > 0), compared + 1
    return Tally(dialect.name, codes, scales, padding, outer, bad, compared)


def ranking(observed: list[Observation], protocol: Protocol) -> list[Tally]:
    """All named dialects that can answer, the nearest first; ties go to the order of the table."""
    tallies = [tally(observed, dialect, protocol) for dialect in dialects.named().values()]
    return sorted((t for t in tallies if t.compared), key=lambda t: t.total)
