"""`quads check`: run the checks of a configuration and leave its reports. CLI and pytest plugin call `run`.

Exit codes: 0 everything conforms, 1 something differs or breaks a rule, 2 bad usage (ValueError), 3 cannot run here
(CannotRunHereError: a package or the hardware is missing).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quads.conformance import runner as runners
from quads.conformance.product_check import check_product
from quads.conformance.protocol import KINDS, Kind, Protocol
from quads.conformance.quantizer_check import check_quantizer
from quads.conformance.result import CheckReport, TargetReport
from quads.conformance.runner import Isolated, Local, Runner
from quads.conformance.settings import LEVELS, Settings
from quads.emulation import dialects


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """What to check and how.

    quantizer, gemm, moe: `pkg.mod:fn`, `file.py:fn` or `adapter:name`; at least one. dialect, arithmetic: what must be
    spoken (empty: any that is known). outer, layout, dtypes, device, ...: protocol fields that override the callable's
    own (None: keep). level: quick or full. isolate: one process a callable, `limit` seconds a call.
    junit, sarif, html, json: files to write; annotations: print GitHub annotations. hardware: file for the answers to
    the questions that no published evidence settles.
    """

    quantizer: str = ""
    gemm: str = ""
    moe: str = ""
    dialect: str = ""
    arithmetic: str = ""
    outer: str | None = None
    layout: str | None = None
    granularity: str | None = None
    dtypes: tuple[str, ...] | None = None
    device: str | None = None
    k_multiple: int | None = None
    row_multiple: int | None = None
    shards: int | None = None
    level: str = "quick"
    seed: int = 0
    isolate: bool = True
    limit: float = 60.0
    junit: Path | None = None
    sarif: Path | None = None
    html: Path | None = None
    json: Path | None = None
    annotations: bool = False
    hardware: Path | None = None

    def __post_init__(self) -> None:
        if not (self.quantizer or self.gemm or self.moe or self.hardware):
            raise ValueError("nothing to check: give a quantizer, gemm or moe as pkg.mod:function, or --hardware FILE")
        if self.level not in LEVELS:
            raise ValueError(f"level {self.level!r} is not one of {', '.join(LEVELS)}")
        if self.dialect:
            dialects.load(self.dialect)
        if self.limit <= 0:
            raise ValueError(f"limit = {self.limit}: seconds a call must be positive")

    @property
    def protocol(self) -> dict[str, Any]:
        """The protocol fields that are given."""
        names = [field.name for field in dataclasses.fields(Protocol)]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def settings(self) -> Settings:
        return dataclasses.replace(LEVELS[self.level], dialect=self.dialect, arithmetic=self.arithmetic, seed=self.seed)


def run(config: CheckConfig, progress: Callable[[str], None] = lambda line: None) -> CheckReport:
    """Check every callable of `config`, write the reports it asks for, and return what was found.

    Workers are spawned: a script that calls this does so under `if __name__ == "__main__":`.
    """
    report = empty_report()
    for kind in KINDS:
        spec = getattr(config, kind)
        if spec:
            progress(f"checking {kind} {spec}")
            report.targets.append(check_one(spec, kind, config))
    if config.hardware:
        from quads.conformance import hardware

        progress("asking what is not established")
        hardware.write(config.hardware, config.gemm, config.protocol)
    _write(report, config)
    return report


def check_one(spec: str, kind: Kind, config: CheckConfig) -> TargetReport:
    """Check one importable callable."""
    if config.isolate:
        runner: Runner = Isolated(spec, config.protocol, config.limit)
    else:
        runner = Local(*runners.protocol_of(spec, config.protocol))
    try:
        return _check(runner, kind, spec, config.settings)
    finally:
        runner.close()


def check_callable(
    fn: Callable[..., Any], kind: Kind, *, settings: Settings | None = None, **protocol: Any
) -> TargetReport:
    """Check a callable object in this process (no time limit): for tests and notebooks."""
    name = getattr(fn, "__qualname__", type(fn).__name__)
    return _check(Local(fn, Protocol.of(fn, protocol)), kind, name, settings or Settings())


def _check(runner: Runner, kind: Kind, spec: str, settings: Settings) -> TargetReport:
    where = runner.location
    target = TargetReport(kind, spec, file=where.file if where else "", line=where.line if where else 0)
    if kind == "quantizer":
        check_quantizer(runner, target, settings)
    else:
        check_product(runner, kind, target, settings)
    return target


def empty_report() -> CheckReport:
    """A report without callables: where it runs, and what is installed."""
    packages = ("torch", "vllm", "flashinfer-python", "torchao", "nvidia-modelopt", "compressed-tensors", "fouroversix")
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return CheckReport(label=f"run on {where}", versions=versions)


def _write(report: CheckReport, config: CheckConfig) -> None:
    from quads.conformance import report_html, report_machine

    writers = {
        config.junit: report_machine.junit,
        config.sarif: report_machine.sarif,
        config.json: report_machine.document,
        config.html: report_html.page,
    }
    for path, writer in writers.items():
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(writer(report), "utf-8")
    if config.annotations:
        print(report_machine.github_annotations(report), end="")
