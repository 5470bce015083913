"""A small probe of the shipped start for tests: few sequences, few arms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quads.suites import config, probe
from quads.suites.config import Suite
from quads.suites.probe import Outcome


def suite(**changes: Any) -> Suite:
    """The `ci` suite with a probe of 8 sequences, 2 draws and arms that differ; `changes` are fields of the probe."""
    small = {"sequences": 8, "draws": 2, "arms": ["w4a16", "nvfp4", "quads-full"], "outliers": [""]}
    fields = {f"probe.{key}": value for key, value in {**small, **changes}.items()}
    return config.load("ci", {**fields, "hypothesis": [], "settings.held_out": 64})


def run(out: Path, suite: Suite, **options: Any) -> Outcome:
    return probe.run(suite, out, device="cpu", **options)
