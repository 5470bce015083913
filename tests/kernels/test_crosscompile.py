"""The cross-compile harness tells good code from code that must not be trusted."""

from __future__ import annotations

import pytest

from quads.kernels.crosscompile import CHIPS, Job, Report, compile_jobs

pytest.importorskip("triton")

JOB = {
    "kernel": "quads.kernels.quantize_details.quantize_jit:amax_kernel",
    "signature": {"x": "*bf16", "amax_bits": "*i32", "count": "i64"},
    "constants": {"WIDTH": 1024, "STEPS": 2},
}


@pytest.mark.parametrize("chip", CHIPS)
def test_a_sound_kernel_compiles_for_every_chip_without_problems(chip: str) -> None:
    [report] = compile_jobs([Job(**JOB, chip=chip)])
    assert report.problems() == []
    assert report.registers > 0 and report.instructions > 16
    assert report.count("atom", "max") == 1


def test_a_spilling_kernel_is_reported() -> None:
    [report] = compile_jobs(
        [
            Job(
                **JOB | {"constants": {"WIDTH": 8192, "STEPS": 4}},
                chip="sm_90a",
                options={"num_warps": 1, "maxnreg": 32},
            )
        ]
    )
    assert any("spills" in problem for problem in report.problems())


def test_a_kernel_that_does_not_compile_is_a_report_with_its_innermost_reason() -> None:
    [bad, good] = compile_jobs(
        [Job(**JOB | {"constants": {"WIDTH": 1000, "STEPS": 1}}, chip="sm_90a"), Job(**JOB, chip="sm_90a")]
    )
    assert "power of 2" in bad.error and bad.problems()
    assert good.problems() == []


def test_limits_of_the_chip_and_an_empty_body_are_problems() -> None:
    sound = {"registers": 32, "instructions": 100}
    assert Report(chip="sm_100a", **sound, shared_bytes=200_000, tmem_columns=512).problems() == []
    assert len(Report(chip="sm_120a", **sound, shared_bytes=200_000).problems()) == 1
    assert len(Report(chip="sm_100a", **sound, tmem_columns=544).problems()) == 1
    assert len(Report(chip="sm_100a", registers=4, instructions=6).problems()) == 1


def test_an_unknown_chip_is_refused() -> None:
    with pytest.raises(ValueError, match=r"chip 'sm_80' is unknown"):
        Job(**JOB, chip="sm_80")
