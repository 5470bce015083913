"""The check of one quantiser: cases, dialects, diagnosis, the smallest failing input."""

from __future__ import annotations

import time
from collections import Counter

from quads.conformance import cases, diagnose, generated, kinds, minimal, observe
from quads.conformance.cases import QuantCase
from quads.conformance.observe import Log, Tally
from quads.conformance.protocol import DTYPES
from quads.conformance.reference import Difference, Observation, Question, correct, difference, given_outer, question
from quads.conformance.result import Candidate, CaseResult, Finding, TargetReport
from quads.conformance.runner import Runner
from quads.conformance.settings import Settings
from quads.emulation import dialects
from quads.emulation.dialects import Dialect

RCP_DIALECTS = 3  # nearest dialects with approximate reciprocals that are tried up to their bits
_Failing = list[tuple[Observation, Question, Difference]]


def check_quantizer(runner: Runner, report: TargetReport, settings: Settings) -> None:
    """Fill `report` with what the quantiser behind `runner` does."""
    started = time.perf_counter()
    protocol, log = runner.protocol, Log()
    target = dialects.load(settings.dialect) if settings.dialect else None
    observe.observe(runner, observe.first_cases(protocol, target, settings.first_amaxes), log)
    ranking = observe.ranking(log.observed, protocol)
    survivors = [dialects.load(t.dialect) for t in ranking if t.total == 0]
    if survivors:
        _more(runner, log, target or survivors[0], settings, report)
        ranking = observe.ranking(log.observed, protocol)
    _rules(log, report)
    if ranking:
        _verdict(runner, log, target or dialects.load(ranking[0].dialect), ranking, report, settings)
        report.candidates = tuple(
            Candidate(t.dialect, t.total, f"{t.codes} codes, {t.scales} scales in {t.cases} of {t.compared} cases")
            for t in ranking
        )
    report.calls, report.elements = log.calls, log.elements
    report.seconds = time.perf_counter() - started


def _more(runner: Runner, log: Log, dialect: Dialect, settings: Settings, report: TargetReport) -> None:
    """Enumerate further and let Hypothesis search, for a kernel that no directed case told from `dialect`."""
    protocol = runner.protocol
    done = {observation.case.name for observation in log.observed}
    for name in protocol.dtypes:
        more = [cases.enumeration(a, dialect, protocol, DTYPES[name]) for a in cases.amaxes(settings.amaxes)]
        observe.observe(runner, (case for case in more if case.name not in done), log)
    if not generated.available():
        report.findings.append(Finding("generated", "note", "hypothesis is not installed: no generated cases"))
        return

    def differs(x: object) -> bool:
        case = QuantCase("generated", "generated", x)  # type: ignore[arg-type]
        given = given_outer(case, protocol)
        outcome = runner.call("quantizer", (case.x, given))
        log.calls, log.elements = log.calls + 1, log.elements + case.x.numel()
        if outcome.value is None:
            return True
        q = question(Observation(case, given, outcome.value), dialect, protocol)
        return difference(outcome.value, correct(q), q).total > 0

    found = generated.find_difference(protocol, differs, settings.examples, settings.seed)
    if found is not None:
        observe.observe(runner, [QuantCase("generated/smallest", "generated", found)], log)


def _verdict(
    runner: Runner, log: Log, base: Dialect, ranking: list[Tally], report: TargetReport, settings: Settings
) -> None:
    names = [t.dialect for t in ranking]
    report.required, report.against = settings.dialect, base.name
    report.speaks = tuple(t.dialect for t in ranking if t.total == 0)
    compared = _compared(log, base, runner)
    if not report.conforms:
        allowed = _up_to_rcp(log, [base.name] if settings.dialect else names, runner)
        if allowed:
            base, compared = allowed
            report.against, report.up_to_rcp, report.speaks = base.name, True, (*report.speaks, base.name)
    failing = [item for item in compared if item[2].total]
    report.cases = tuple(_case(observation, d) for observation, _, d in compared)
    if failing and not report.conforms:
        _diagnosis(runner, log, base, names, failing, report, settings)


def _up_to_rcp(log: Log, names: list[str], runner: Runner) -> tuple[Dialect, _Failing] | None:
    """The first near dialect from which every difference is at a byte that reciprocals within 1 ulp leave open."""
    near = [d for d in map(dialects.load, names) if d.reciprocal != "exact"][:RCP_DIALECTS]
    for dialect in near:
        compared = _compared(log, dialect, runner)
        if all(kinds.depends_on_rcp(q, d) for _, q, d in compared if d.total):
            return dialect, compared
    return None


def _diagnosis(
    runner: Runner,
    log: Log,
    base: Dialect,
    names: list[str],
    failing: _Failing,
    report: TargetReport,
    settings: Settings,
) -> None:
    found = diagnose.explain(log.observed, names, runner.protocol, settings.dialect or None)
    report.explanations = tuple(e.sentence() for e in found)
    report.faults = tuple(tuple(fault.name for fault in e.faults) for e in found if e.complete)
    level = "error" if not report.speaks or settings.dialect else "note"
    for e in found:
        certainty = "explained by" if e.complete else "partly explained by"
        report.findings += [Finding(fault.name, level, f"{certainty} {e.sentence()}") for fault in e.faults[:1]]
    if found and found[0].complete and found[0].dialect != base.name:
        base = dialects.load(found[0].dialect)
        compared = _compared(log, base, runner)
        failing = [item for item in compared if item[2].total]
        report.against, report.cases = base.name, tuple(_case(observation, d) for observation, _, d in compared)
    report.kinds = kinds.classify(failing)
    report.first = minimal.first_failure(runner, failing, base)
    if not found:
        report.findings.append(Finding("differs", level, f"{report.headline()}; no known fault explains it"))


def _compared(log: Log, base: Dialect, runner: Runner) -> _Failing:
    pairs = observe.questions(log.observed, base, runner.protocol)
    return [(o, q, difference(o.answer, correct(q), q)) for o, q in pairs]


def _case(observation: Observation, d: Difference) -> CaseResult:
    parts = {"codes": int(d.codes.sum()), "scales": int(d.scales.sum()), "padding bytes": d.padding, "outer": d.outer}
    message = ", ".join(f"{count} {name} differ" for name, count in parts.items() if count)
    return CaseResult(observation.case.name, observation.case.group, d.total, message)


def _rules(log: Log, report: TargetReport) -> None:
    """Broken rules, one finding a rule, with how many cases broke it. A refusal of NaN or Inf is within the rules."""
    counts = Counter(violation.rule for name, violation in log.violations)
    for rule, count in counts.items():
        names = [name for name, violation in log.violations if violation.rule == rule]
        first = next(violation for _, violation in log.violations if violation.rule == rule)
        refusal = rule == "raises" and all(name.startswith(("nonfinite/", "stride/")) for name in names)
        message = f"{first.message} ({count} cases, first {names[0]})"
        report.findings.append(Finding(rule, "note" if refusal else "error", message, names[0]))
