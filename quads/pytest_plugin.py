"""pytest plugin: NVFP4 conformance in any project's tests.

On the command line, a test is added for each callable:
    pytest --nvfp4-quantizer pkg.mod:fn [--nvfp4-gemm ... --nvfp4-moe ... --nvfp4-dialect exact]
In one's own tests:
    def test_mine(nvfp4_check):
        nvfp4_check(my_quantizer, "quantizer", dialect="exact", outer="divisor")

Heavy imports happen where a check runs, not where pytest starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_KINDS = ("quantizer", "gemm", "moe")
_PROTOCOL = {
    "outer": "multiplier, divisor or own",
    "layout": "linear, 128x4 or 8x4",
    "device": "cpu or cuda",
    "dtypes": "comma-separated, for example bfloat16,float32",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nvfp4", "NVFP4 conformance (quads)")
    for kind in _KINDS:
        group.addoption(f"--nvfp4-{kind}", metavar="SPEC", help=f"check this {kind}: pkg.mod:fn or adapter:name")
    group.addoption("--nvfp4-dialect", default="", help="the dialect that the quantizer must speak")
    group.addoption("--nvfp4-level", default="quick", help="quick or full")
    for name, text in _PROTOCOL.items():
        group.addoption(f"--nvfp4-{name}", help=f"protocol: {text}")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    for kind in _KINDS:
        spec = config.getoption(f"--nvfp4-{kind}")
        if spec:
            items.append(ConformanceItem.from_parent(session, name=f"nvfp4 {kind} {spec}", kind=kind, spec=spec))


class ConformanceError(AssertionError):
    """A callable does not conform; the message is the report."""


class ConformanceItem(pytest.Item):
    """One callable of the command line."""

    def __init__(self, *, kind: str, spec: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind, self.spec = kind, spec

    def runtest(self) -> None:
        from quads.conformance.check import CheckConfig, check_one
        from quads.errors import CannotRunHereError

        option = self.config.getoption
        fields: dict[str, Any] = {name: option(f"--nvfp4-{name}") for name in _PROTOCOL}
        if fields["dtypes"]:
            fields["dtypes"] = tuple(fields["dtypes"].split(","))
        fields |= {self.kind: self.spec, "level": option("--nvfp4-level")}
        if self.kind == "quantizer":
            fields["dialect"] = option("--nvfp4-dialect")
        config = CheckConfig(**fields)
        try:
            _require(check_one(self.spec, self.kind, config))  # type: ignore[arg-type]
        except CannotRunHereError as error:
            pytest.skip(str(error))

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        if isinstance(excinfo.value, ConformanceError | ValueError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


@pytest.fixture
def nvfp4_check() -> Iterator[Callable[..., Any]]:
    """`nvfp4_check(fn, kind, dialect=..., **protocol)`: checks a callable in this process, fails with the report."""

    def check(fn: Callable[..., Any], kind: str = "quantizer", *, dialect: str = "", **protocol: Any) -> Any:
        from quads.conformance.check import check_callable
        from quads.conformance.settings import Settings

        report = check_callable(fn, kind, settings=Settings(dialect=dialect), **protocol)  # type: ignore[arg-type]
        _require(report)
        return report

    yield check


def _require(report: Any) -> None:
    if report.passed:
        return
    lines = [f"{report.kind} {report.spec}: {report.headline()}"]
    lines += [f"  {finding.level} {finding.rule}: {finding.message}" for finding in report.findings]
    if report.first:
        first = report.first
        lines += [f"  first failing input ({first.case}): {first.input_hex}"]
        lines += [f"    expected {first.expected}", f"    got      {first.got}", first.explain]
    raise ConformanceError("\n".join(lines))
