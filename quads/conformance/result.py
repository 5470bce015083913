"""What a check found, as plain records: the terminal, JSON, JUnit, SARIF, annotations and HTML are made of these."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

NAMES = 3  # of dialects or arithmetics that a headline lists


@dataclass(frozen=True)
class Finding:
    """What is wrong, or worth knowing. rule: fault, broken rule or kind; level: error, warning or note."""

    rule: str
    level: str
    message: str
    case: str = ""


@dataclass(frozen=True)
class Candidate:
    """A dialect or arithmetic and how many bytes or outputs of the kernel differ from it."""

    name: str
    differing: int
    detail: str


@dataclass(frozen=True)
class CaseResult:
    """One case against the dialect that the report is about."""

    name: str
    group: str
    differing: int
    message: str = ""


@dataclass(frozen=True)
class FirstFailure:
    """The smallest input found that still differs: hexadecimal words, and the explanation of its roundings."""

    case: str
    input_hex: str
    expected: str
    got: str
    explain: str = ""


@dataclass
class TargetReport:
    """One callable. speaks: dialects or arithmetics that give every byte; against: what the counts refer to."""

    kind: str
    spec: str
    file: str = ""
    line: int = 0
    against: str = ""
    speaks: tuple[str, ...] = ()
    required: str = ""
    up_to_rcp: bool = False
    candidates: tuple[Candidate, ...] = ()
    explanations: tuple[str, ...] = ()
    faults: tuple[tuple[str, ...], ...] = ()
    kinds: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    cases: tuple[CaseResult, ...] = ()
    first: FirstFailure | None = None
    calls: int = 0
    elements: int = 0
    seconds: float = 0.0

    @property
    def conforms(self) -> bool:
        return bool(self.speaks) and (not self.required or self.required in self.speaks)

    @property
    def passed(self) -> bool:
        return self.conforms and not any(finding.level == "error" for finding in self.findings)

    def headline(self) -> str:
        """One line: what it conforms to, or what is wrong."""
        if self.conforms:
            others = [name for name in self.speaks if name != self.required]
            first = self.required or others.pop(0)
            alike = f" (and, on these cases, to {_listed(others)})" if others else ""
            rcp = ", but for bytes that depend on rcp.approx" if self.up_to_rcp else ""
            return f"conforms to {first}{rcp}{alike}"
        if not self.candidates:
            return "gave no answer that could be compared"
        what = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        differing = sum(case.differing for case in self.cases)
        speaks = f"; it speaks {_listed(list(self.speaks))}" if self.speaks else ""
        return f"differs from {self.against} in {differing} places" + (f": {what}" if what else "") + speaks


def _listed(names: list[str]) -> str:
    shown = "; ".join(names[:NAMES])
    return shown + (f" and {len(names) - NAMES} more" if len(names) > NAMES else "")


@dataclass
class CheckReport:
    """All callables of one run."""

    targets: list[TargetReport] = field(default_factory=list)
    label: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 all conform, 1 something differs or breaks a rule."""
        return int(not all(target.passed for target in self.targets))

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        targets = [asdict(target) | {"passed": target.passed, "headline": target.headline()} for target in self.targets]
        return {"schema": 1, "label": self.label, "versions": self.versions, "targets": targets}
