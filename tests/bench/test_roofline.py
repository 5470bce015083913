"""Rooflines from a run's ceilings and from a chip."""

from __future__ import annotations

import pytest

from quads.bench import roofline
from quads.bench.results import Result
from quads.bench.roofline import Roof
from quads.bench.specs import chip
from tests.bench.bench_run import ceilings


def test_a_roof_rises_with_intensity_up_to_its_ridge() -> None:
    roof = Roof(numerics="bf16", bytes_per_s=2.0, flops_per_s=10.0, kind="measured")
    assert [roof.at(x) for x in (1, 5, 50)] == [2, 10, 10]
    assert roof.ridge == 5


def test_a_runs_roofs_are_its_own_ceilings() -> None:
    roofs = {roof.numerics: roof for roof in roofline.of_run(ceilings())}
    assert roofs["bf16"].flops_per_s == chip("H200").matrix("bf16").value
    assert {roof.bytes_per_s for roof in roofs.values()} == {chip("H200").copy.value}


def test_without_a_copy_there_is_no_roof() -> None:
    assert roofline.of_run([one for one in ceilings() if one.numerics != "copy"]) == []


def test_only_chips_with_fp4_have_its_roof() -> None:
    assert [roof.numerics for roof in roofline.of_chip(chip("H200"))] == ["bf16", "fp8"]
    assert [roof.numerics for roof in roofline.of_chip(chip("GB10"))] == ["bf16", "fp8", "nvfp4"]


def test_intensity_needs_both_counts() -> None:
    one = Result(op="gemm", numerics="bf16", implementation="x", shape={}, seconds=1.0, bytes=4.0, flops=8.0)
    assert roofline.intensity(one) == pytest.approx(2.0)
    assert (
        roofline.intensity(Result(op="quantize", numerics="nvfp4", implementation="x", shape={}, seconds=1.0)) is None
    )
