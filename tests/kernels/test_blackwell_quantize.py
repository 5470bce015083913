"""Life (iii): the quantisers cross-compiled. Native conversions, exact division, no flush to zero, no spill."""

from __future__ import annotations

import re

import pytest

from quads.kernels.crosscompile import Job, Report, compile_jobs
from quads.kernels.quantize_details.compiled import KERNELS, job

pytest.importorskip("triton")

BLACKWELL = ("sm_100a", "sm_103a", "sm_120a")
CHIPS = ("sm_90a", *BLACKWELL)
ENCODERS = [name for name in KERNELS if not name.startswith("fake")]


@pytest.fixture(scope="module")
def reports() -> dict[tuple[str, str], Report]:
    """Every kernel for every chip, compiled once."""
    wanted = [(name, chip) for name in KERNELS for chip in CHIPS]
    return dict(zip(wanted, compile_jobs([job(*key) for key in wanted]), strict=True))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_within_the_limits_of_the_chip(reports: dict[tuple[str, str], Report], name: str, chip: str) -> None:
    assert reports[name, chip].problems() == []


@pytest.mark.parametrize("chip", BLACKWELL)
@pytest.mark.parametrize("name", ENCODERS)
def test_codes_are_made_by_the_native_conversion(reports: dict[tuple[str, str], Report], name: str, chip: str) -> None:
    assert reports[name, chip].count("cvt.rn.satfinite.e2m1x2.f32") >= 8


@pytest.mark.parametrize("name", ENCODERS)
def test_hopper_code_has_no_fp4_conversion(reports: dict[tuple[str, str], Report], name: str) -> None:
    assert reports[name, "sm_90a"].count("e2m1x2") == 0


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", KERNELS)
def test_arithmetic_is_rounded_and_keeps_subnormals(
    reports: dict[tuple[str, str], Report], name: str, chip: str
) -> None:
    """No flush to zero, no approximate division, no fusion that the source does not ask for."""
    report = reports[name, chip]
    floating = {op for op in report.ptx_opcodes if re.search(r"^(add|sub|mul|fma|mad|div|rcp|ex2|sqrt)\b.*f32", op)}
    assert floating
    allowed = {"rcp.approx.ftz.f32"} if "vllm" in name else set()
    bad = {op for op in floating if ".ftz" in op or ".approx" in op or ".full" in op or ".rn" not in op}
    assert bad == allowed


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", ENCODERS)
def test_block_scales_are_not_taken_from_halves_of_a_pair(
    reports: dict[tuple[str, str], Report], name: str, chip: str
) -> None:
    """Triton's cast to E4M3 splits a pair by shr.s16, which ptxas 12.8 reads too early: every fourth scale was 0."""
    ptx = reports[name, chip].ptx
    pairs = set(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32\s+(%\w+|\w+),", ptx))
    halves = set(re.findall(r"shr\.s16\s+%\w+, (%\w+), 8;", ptx))
    assert pairs and not pairs & halves


@pytest.mark.parametrize("chip", ["sm_90a", "sm_100a", "sm_120a"])
def test_loads_and_stores_are_as_wide_as_the_block_allows(reports: dict[tuple[str, str], Report], chip: str) -> None:
    """Four blocks a thread: eight 16-byte loads of x, four 8-byte stores of codes."""
    report = reports["quantize", chip]
    assert report.count("ld.global.v4.b32") == 8
    assert report.count("st.global.v2.b32") == 4


@pytest.mark.parametrize("element", ["fp16", "fp32"])
def test_other_input_types_compile_without_problems(element: str) -> None:
    wanted: list[Job] = [job(name, chip, element) for name in ("quantize", "fake-quantize") for chip in CHIPS[:2]]
    assert [report.problems() for report in compile_jobs(wanted)] == [[]] * len(wanted)
