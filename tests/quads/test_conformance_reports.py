"""Reports of a failing and of a passing callable: JSON, JUnit, SARIF, annotations, HTML, terminal, exit codes."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from quads.conformance import adapters, report_html, report_machine, report_terminal
from quads.conformance.check import CheckConfig, check_callable, run
from quads.conformance.protocol import load_callable
from quads.conformance.result import CheckReport
from quads.conformance.settings import Settings
from quads.errors import CannotRunHereError
from tests.quads.conformance_kernels import Kernel

EXAMPLE = Path(__file__).parents[2] / "examples" / "conformance" / "my_kernel.py"
LEAN = Settings(first_amaxes=1, amaxes=1, examples=3)


@cache
def failing() -> CheckReport:
    return CheckReport([check_callable(load_callable(f"{EXAMPLE}:quantize"), "quantizer", settings=LEAN)])


@cache
def passing() -> CheckReport:
    return CheckReport([check_callable(Kernel(), "quantizer", settings=LEAN)])


def test_a_newcomers_kernel_is_diagnosed_with_both_of_its_mistakes() -> None:
    target = failing().targets[0]
    assert target.faults == (("code-ties-toward", "nibbles-swapped"),)
    assert "nibble order" in target.kinds
    assert target.first is not None
    assert "dialect exact" in target.first.explain


def test_exit_codes_are_0_and_1() -> None:
    assert (passing().exit_code, failing().exit_code) == (0, 1)


def test_junit_counts_failures_and_gives_the_explanation() -> None:
    suite = ElementTree.fromstring(report_machine.junit(failing())).find("testsuite")
    assert suite is not None
    failures = suite.findall("./testcase/failure")
    assert int(suite.get("failures", "0")) == len(failures) > 0
    assert any("nibbles-swapped" in (failure.text or "") for failure in failures)
    assert ElementTree.fromstring(report_machine.junit(passing())).find(".//failure") is None


def test_sarif_places_a_rule_with_its_evidence_at_the_function() -> None:
    run_ = json.loads(report_machine.sarif(failing()))["runs"][0]
    rule = run_["tool"]["driver"]["rules"][0]
    place = run_["results"][0]["locations"][0]["physicalLocation"]
    assert rule["id"] == run_["results"][0]["ruleId"] == "code-ties-toward"
    assert place["artifactLocation"]["uri"] == str(EXAMPLE)
    assert EXAMPLE.read_text().splitlines()[place["region"]["startLine"] - 1].startswith("def quantize")


def test_annotations_are_one_escaped_line_a_finding() -> None:
    lines = report_machine.github_annotations(failing()).splitlines()
    assert lines[0].startswith("::error file=")
    assert "code-ties-toward" in lines[0]
    assert report_machine.github_annotations(passing()) == ""


def test_the_json_document_has_the_verdict() -> None:
    document = json.loads(report_machine.document(failing()))
    assert document["targets"][0]["passed"] is False
    assert document["targets"][0]["headline"].startswith("differs from exact")


def test_the_page_is_self_contained_and_escaped() -> None:
    report = CheckReport(failing().targets)
    report.label = "<script>"
    page = report_html.page(report)
    assert "<script>" not in page
    assert "http" not in page.replace("xmlns", "")
    assert "nibbles-swapped" in page


def test_the_terminal_shows_verdict_fault_and_bytes() -> None:
    out = io.StringIO()
    report_terminal.show(failing(), Console(file=out, width=200))
    for text in ("FAIL", "nibbles-swapped", "expected", "scale 0x"):
        assert text in out.getvalue()


def test_a_run_writes_what_was_asked_for(tmp_path: Path) -> None:
    config = CheckConfig(
        gemm="tests.quads.test_conformance_reports:no_product", isolate=False, html=tmp_path / "a" / "r.html"
    )
    report = run(config)
    assert report.exit_code == 1
    assert report.targets[0].headline() == "gave no answer that could be compared"
    assert (tmp_path / "a" / "r.html").exists()


def no_product(*args: object) -> None:
    return None


def test_an_adapter_that_cannot_run_here_says_what_it_needs() -> None:
    missing = [adapter for adapter in adapters.table().values() if adapter.why_not()]
    for adapter in missing:
        with pytest.raises(CannotRunHereError, match="needs"):
            adapter.load()
    assert any(adapter.gpu for adapter in adapters.table().values())


def test_every_adapter_has_a_wrapper_and_a_valid_protocol() -> None:
    from quads.conformance import libraries
    from quads.conformance.protocol import Protocol
    from quads.emulation import dialects

    for adapter in adapters.table().values():
        assert callable(getattr(libraries, adapter.wrapper))
        Protocol.of(lambda x, outer: x, adapter.protocol)
        assert adapter.kind != "quantizer" or dialects.load(adapter.dialect)


@pytest.mark.parametrize("name", ["compressed-tensors", "torchao", "fouroversix-six"])
def test_an_installed_library_conforms_to_its_dialect(name: str) -> None:
    adapter = adapters.named(name)
    reason = adapter.why_not()
    if reason:
        pytest.skip(reason)
    settings = Settings(dialect=adapter.dialect, first_amaxes=1, amaxes=1, examples=5)
    fields = adapter.protocol | {"dtypes": ("bfloat16",)}
    assert check_callable(adapter.load(), "quantizer", settings=settings, **fields).passed
