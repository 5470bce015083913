"""The check of a product or a grouped product: cases, arithmetics, faults."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quads.conformance import faults, grouped, products
from quads.conformance.calls import Violation
from quads.conformance.faults import Fault
from quads.conformance.products import Arithmetic, bits_differ
from quads.conformance.protocol import Kind, Protocol, write_scales
from quads.conformance.result import Candidate, CaseResult, Finding, FirstFailure, TargetReport
from quads.conformance.runner import Runner
from quads.conformance.settings import Settings
from quads.emulation import undecided

NEAREST = 2  # arithmetics that faults are planted in, besides the tensor core's own
SEQUENTIAL = "sequential"


@dataclass(frozen=True)
class Family:
    """What differs between plain and grouped products."""

    cases: Callable[[Protocol], Iterable[Any]]
    arguments: Callable[[Any, Protocol], tuple[Any, ...]]
    ask: Callable[..., Any]
    correct: Callable[[Any], Tensor]
    faults: Callable[[], tuple[Fault, ...]]


def _product_arguments(case: products.ProductCase, protocol: Protocol) -> tuple[Any, ...]:
    a, b = (write_scales(x.scales, protocol, poison=case.poison) for x in (case.a, case.b))
    return products.packed(case.a), a, products.packed(case.b), b, case.alpha, case.dtype


FAMILIES: dict[str, Family] = {
    "gemm": Family(
        products.product_cases, _product_arguments, products.ProductQuestion, products.correct, faults.product_faults
    ),
    "moe": Family(
        grouped.grouped_cases, grouped.arguments, grouped.GroupedQuestion, grouped.correct, faults.grouped_faults
    ),
}


@dataclass(frozen=True)
class _Seen:
    case: Any
    answer: Tensor


def check_product(runner: Runner, kind: Kind, report: TargetReport, settings: Settings) -> None:
    """Fill `report` with what the product behind `runner` does."""
    started, family = time.perf_counter(), FAMILIES[kind]
    known = products.arithmetics()
    if settings.arithmetic and settings.arithmetic not in known:
        raise ValueError(f"arithmetic {settings.arithmetic!r} is unknown; known: {'; '.join(known)}")
    seen, violations = _observe(runner, kind, family, report)
    _rules(violations, report)
    if seen:
        counts = {name: _left(seen, family, runner.protocol, a, family.correct) for name, a in known.items()}
        names = sorted(counts, key=lambda name: counts[name])
        report.candidates = tuple(Candidate(name, counts[name], _native(known[name])) for name in names)
        report.speaks = tuple(name for name in names if counts[name] == 0)
        report.required = settings.arithmetic
        base = known[settings.arithmetic or names[0]]
        _verdict(seen, family, runner.protocol, base, [known[name] for name in names], report)
    report.seconds = time.perf_counter() - started


def _observe(
    runner: Runner, kind: Kind, family: Family, report: TargetReport
) -> tuple[list[_Seen], list[tuple[str, Violation]]]:
    seen, violations = [], []
    for case in family.cases(runner.protocol):
        outcome = runner.call(kind, family.arguments(case, runner.protocol))
        report.calls += 1
        violations += [(case.name, violation) for violation in outcome.violations]
        if outcome.value is not None:
            seen.append(_Seen(case, outcome.value))
            report.elements += outcome.value.numel()
        if sum(violation.rule == "hangs" for _, violation in violations) >= 3:
            break
    return seen, violations


def _left(seen: list[_Seen], family: Family, protocol: Protocol, a: Arithmetic, effect: Callable[[Any], Tensor]) -> int:
    return sum(int(bits_differ(s.answer, effect(family.ask(s.case, a, protocol))).sum()) for s in seen)


def _verdict(
    seen: list[_Seen],
    family: Family,
    protocol: Protocol,
    base: Arithmetic,
    ranked: list[Arithmetic],
    report: TargetReport,
) -> None:
    if not report.conforms:
        native = [a for a in ranked if a.native]
        bases = (
            [base]
            if report.required
            else list(dict.fromkeys([*native[:1], *ranked[:NEAREST], *(a for a in ranked if a.name == SEQUENTIAL)]))
        )
        base = _diagnosis(seen, family, protocol, bases, report)
    report.against = base.name
    differs = [bits_differ(s.answer, family.correct(family.ask(s.case, base, protocol))) for s in seen]
    report.cases = tuple(_case(s, d) for s, d in zip(seen, differs, strict=True))
    _padding_leak(report)
    failing = [(s, d) for s, d in zip(seen, differs, strict=True) if bool(d.any())]
    if failing and not report.conforms:
        report.first = _first(*failing[0], family.correct(family.ask(failing[0][0].case, base, protocol)))
        report.kinds = dict(Counter(s.case.group for s, _ in failing))
        _undecided(failing, report)


def _diagnosis(
    seen: list[_Seen], family: Family, protocol: Protocol, bases: list[Arithmetic], report: TargetReport
) -> Arithmetic:
    """Name the faults that explain every output; the arithmetic they are planted in."""
    tried = [(a, fault) for a in bases for fault in family.faults()]
    alone = {a: _left(seen, family, protocol, a, family.correct) for a in bases}
    complete = [(0, alone[a], a, fault) for a, fault in tried if _explains(seen, family, protocol, a, fault)]
    first = complete[0][2] if complete else bases[0]
    found = [] if complete else [(_left(seen, family, protocol, a, f.effect), alone[a], a, f) for a, f in tried]
    for left, of, a, fault in [item for item in complete if item[2] is first] or _most(found):
        share = "all" if left == 0 else f"{of - left} of"
        sentence = f"{a.name} with {fault.name}: {fault.summary} ({share} {of} differing outputs; {fault.evidence})"
        report.explanations += (sentence,)
        report.faults += ((fault.name,),) if left == 0 else ()
        certainty = "explained by" if left == 0 else "partly explained by"
        level = "note" if report.speaks and not report.required else "error"
        report.findings.append(Finding(fault.name, level, f"{certainty} {sentence}"))
    if not report.explanations:
        report.findings.append(Finding("differs", "error", "no known fault explains the outputs"))
    return first


def _explains(seen: list[_Seen], family: Family, protocol: Protocol, a: Arithmetic, fault: Fault) -> bool:
    asked = ((s, family.ask(s.case, a, protocol)) for s in seen)
    return not any(bool(bits_differ(s.answer, fault.effect(q)).any()) for s, q in asked)


def _most(found: list[tuple[int, int, Arithmetic, Fault]]) -> list[tuple[int, int, Arithmetic, Fault]]:
    partly = [item for item in found if item[0] < item[1] * 0.9]
    return sorted(partly, key=lambda item: item[0])[:3]


def _padding_leak(report: TargetReport) -> None:
    """Outputs that change with what lies in padding rows of the scales."""
    clean = {case.name.split("/", 1)[1]: case.differing for case in report.cases if case.group == "shape"}
    leaks = [c for c in report.cases if c.group == "poison" and c.differing > clean.get(c.name.split("/", 1)[1], 0)]
    if leaks:
        message = f"padding rows of the block scales (0x7F) reach {leaks[0].differing} outputs of {leaks[0].name}"
        report.findings.append(Finding("padding-read", "error", f"{message}; vLLM #37563, FlashInfer #2861"))


def _undecided(failing: list[tuple[_Seen, Tensor]], report: TargetReport) -> None:
    """A difference that rests on a rule which no published evidence decides is evidence, not a fault."""
    for s, d in failing:
        if not isinstance(s.case, products.ProductCase) or s.case.group != "directed":
            continue
        rules = undecided.not_established_matmul(s.case.a, s.case.b)
        open_ = [rule for rule, where in rules.items() if bool((where & d).any())]
        if open_:
            message = f"{s.case.name} rests on a rule that is not established: {', '.join(open_)}"
            report.findings.append(Finding("not-established", "note", message, s.case.name))


def _case(s: _Seen, d: Tensor) -> CaseResult:
    count = int(d.sum())
    return CaseResult(s.case.name, s.case.group, count, f"{count} of {d.numel()} outputs differ" if count else "")


def _first(s: _Seen, d: Tensor, want: Tensor) -> FirstFailure:
    row, column = (int(i) for i in d.nonzero()[0])
    where = f"{s.case.name}, output [{row}, {column}] of {tuple(d.shape)}"
    return FirstFailure(where, f"vectors: case {s.case.name}", _word(want[row, column]), _word(s.answer[row, column]))


def _word(value: Tensor) -> str:
    bits = int(value.reshape(1).view(torch.int32 if value.dtype == torch.float32 else torch.int16))
    digits = 8 if value.dtype == torch.float32 else 4
    return f"{bits & (16**digits - 1):0{digits}X} ({float(value):.9g})"


def _native(a: Arithmetic) -> str:
    return "the modelled tensor core" if a.native else "another arithmetic"


def _rules(violations: list[tuple[str, Violation]], report: TargetReport) -> None:
    for rule in dict.fromkeys(violation.rule for _, violation in violations):
        same = [(name, violation) for name, violation in violations if violation.rule == rule]
        message = f"{same[0][1].message} ({len(same)} cases, first {same[0][0]})"
        report.findings.append(Finding(rule, "error", message, same[0][0]))
