"""Reports for machines: one JSON document, JUnit XML, SARIF 2.1.0, GitHub workflow annotations."""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from quads.conformance import faults
from quads.conformance.result import CaseResult, CheckReport, Finding, TargetReport

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd]")
_SARIF_LEVEL = {"error": "error", "warning": "warning", "note": "note"}
_ANNOTATION = {"error": "error", "warning": "warning", "note": "notice"}


def document(report: CheckReport) -> str:
    """The JSON document."""
    return json.dumps(report.to_dict(), indent=1, sort_keys=True) + "\n"


def junit(report: CheckReport) -> str:
    """One suite a callable, one test a group of cases, and one for the rules of the protocol."""
    suites = [_suite(target) for target in report.targets]
    return '<?xml version="1.0" encoding="utf-8"?>\n<testsuites>\n' + "".join(suites) + "</testsuites>\n"


def _suite(target: TargetReport) -> str:
    tests = [_protocol_test(target)]
    for group, cases in groupby(sorted(target.cases, key=lambda case: case.group), key=lambda case: case.group):
        tests.append(_test(target, group, [case for case in cases if case.differing]))
    failures = sum("<failure" in test for test in tests)
    name = quoteattr(f"nvfp4 {target.kind} {target.spec}")
    head = f'<testsuite name={name} tests="{len(tests)}" failures="{failures}" time="{target.seconds:.3f}">\n'
    return head + "".join(tests) + "</testsuite>\n"


def _test(target: TargetReport, group: str, differing: list[CaseResult]) -> str:
    body = ""
    if differing and not target.conforms:
        lines = [f"{case.name}: {case.message}" for case in differing[:20]]
        body = _failure(f"{len(differing)} cases differ from {target.against}", [*target.explanations, *lines])
    return f"<testcase classname={quoteattr(target.spec)} name={quoteattr(group)}>{body}</testcase>\n"


def _protocol_test(target: TargetReport) -> str:
    broken = [f for f in target.findings if f.level == "error"]
    body = _failure(target.headline(), [f"{f.rule}: {f.message}" for f in broken]) if not target.passed else ""
    return f'<testcase classname={quoteattr(target.spec)} name="conforms">{body}</testcase>\n'


def _failure(message: str, lines: list[str]) -> str:
    return f"<failure message={quoteattr(_xml(message))}>{escape(_xml(chr(10).join(lines)))}</failure>"


def _xml(text: str) -> str:
    """Characters that XML 1.0 allows."""
    return _NOT_XML.sub("?", text)


def sarif(report: CheckReport) -> str:
    """SARIF 2.1.0: each finding a result at the callable's definition, each known fault a rule with its evidence."""
    found = [(target, finding) for target in report.targets for finding in _findings(target)]
    rules = [_rule(name) for name in dict.fromkeys(finding.rule for _, finding in found)]
    results = [_result(target, finding) for target, finding in found]
    run = {"tool": {"driver": {"name": "quads check", "rules": rules}}, "results": results}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _findings(target: TargetReport) -> list[Finding]:
    """The findings, and the headline where a callable fails without one."""
    errors = [finding for finding in target.findings if finding.level == "error"]
    return target.findings if target.passed or errors else [*target.findings, _headline(target)]


def _headline(target: TargetReport) -> Finding:
    return Finding("differs", "error", target.headline())


def _rule(name: str) -> dict[str, Any]:
    for rows in faults.table().values():
        if name in rows:
            text = f"{rows[name]['summary']} ({rows[name]['evidence']})"
            return {"id": name, "shortDescription": {"text": text}}
    return {"id": name, "shortDescription": {"text": name.replace("-", " ")}}


def _result(target: TargetReport, finding: Finding) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "level": _SARIF_LEVEL[finding.level],
        "message": {"text": f"{target.kind} {target.spec}: {finding.message}"},
    }
    if target.file:
        place = {"artifactLocation": {"uri": target.file}, "region": {"startLine": max(1, target.line)}}
        result["locations"] = [{"physicalLocation": place}]
    return result


def github_annotations(report: CheckReport) -> str:
    """GitHub workflow commands, one a finding."""
    lines = []
    for target in report.targets:
        where = f"file={_property(target.file)},line={target.line}," if target.file else ""
        for finding in _findings(target):
            title = f"title={_property(f'NVFP4 {target.kind}: {finding.rule}')}"
            lines.append(f"::{_ANNOTATION[finding.level]} {where}{title}::{_data(finding.message)}\n")
    return "".join(lines)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
