"""The Triton product, compiled here for chips that are not here: native FP4, no spill, within the chip's limits."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from quads.kernels.crosscompile import Job, Report, compile_jobs
from quads.kernels.gemm_details import native
from quads.kernels.gemm_details.compiled import ALIGNED, CASES, FAMILY, KERNEL, SIGNATURE, Case, K

pytest.importorskip("triton")
MMA = {
    "sm_100": ("tcgen05.mma", "kind::mxf4nvf4", "scale_vec::4X"),
    "sm_120": ("mma.sync", "m16n8k64", "mxf4nvf4", "4X", "ue4m3"),
}
RECORD = Path(__file__).parents[2] / "docs" / "results" / "kernels-modelled" / "gemm.json"


@cache
def reports() -> dict[Case, Report]:
    return dict(zip(CASES, compile_jobs([case.job() for case in CASES]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_product_is_native_and_fits_the_chip(case: Case) -> None:
    report = reports()[case]
    assert report.problems() == []
    loops = 2 if case.extra else 1
    assert report.count(*MMA[FAMILY[case.chip]]) >= loops * multiplies(case), report.ptx_opcodes


def multiplies(case: Case) -> int:
    """Native instructions of one step of K, for one warp where warps share them (sm_120)."""
    tile = case.tile
    k_steps = tile.blocks * 16 // 64
    if FAMILY[case.chip] == "sm_100":
        return k_steps
    return k_steps * (tile.tokens // 8) * (tile.rows // 16) // tile.warps


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["sm_100a", "sm_103a"])
def test_weights_and_their_scales_come_through_tma(chip: str) -> None:
    report = reports()[Case(chip, 16, 0, grouped=True)]
    assert report.count("cp.async.bulk.tensor.2d") > 0
    assert report.count("cp.async.bulk.tensor.5d") > 0
    assert report.count("tcgen05.cp", "warpx4", "32x128b") > 0  # scales go from shared memory to TMEM, not by registers


@pytest.mark.slow
def test_too_few_rows_for_the_first_operand_are_caught() -> None:
    """The check can fail: without the swap, 16 tokens do not compile to a native product on sm_100."""
    case = Case("sm_100a", 16)
    job = case.job()
    [report] = compile_jobs([Job(**{**job.__dict__, "constants": {**job.constants, "SWAP": False}})])
    assert report.problems() or report.count(*MMA["sm_100"]) == 0


@pytest.mark.slow
def test_the_portable_twin_compiles_for_chips_without_fp4() -> None:
    few, many = (native.tile_for("portable", tokens) for tokens in (1, 4096))
    jobs = [
        Job(
            kernel=KERNEL,
            chip="sm_90a",
            signature=SIGNATURE,
            divisible=ALIGNED,
            constants={
                **{**Case("sm_100a", 1).job().constants, **tile.constants(), **native.steps(tile, 256, extra)},
                "SPECIALIZE": False,
            },
            options={"num_warps": tile.warps, "num_stages": tile.stages},
        )
        for tile, extra in ((few, 64), (many, 0))
    ]
    assert [report.problems() for report in compile_jobs(jobs)] == [[], []]


@pytest.mark.slow
def test_the_published_record_is_what_the_compiler_says() -> None:
    recorded = {
        (row["chip"], row["tokens"], row["extra"], row["grouped"]): row
        for row in json.loads(RECORD.read_text())["rows"]
    }
    for case, report in reports().items():
        row = recorded[(case.chip, case.tokens, case.extra, case.grouped)]
        assert row["native_mma_instructions"] == report.count(*MMA[FAMILY[case.chip]])
        assert (row["shared_bytes"], row["tmem_columns"]) == (report.shared_bytes, report.tmem_columns)


def record() -> None:
    """Write docs/results/kernels-modelled/gemm.json: python -c 'from tests... import record' is not needed by CI."""
    rows = []
    for case, report in reports().items():
        tile, per_step = case.tile, case.tile.blocks * 16
        rows.append({
            "chip": case.chip, "tokens": case.tokens, "extra": case.extra, "grouped": case.grouped,
            "tile_tokens": tile.tokens, "tile_rows": tile.rows, "k_per_step": per_step, "swap": tile.swap,
            "tma": tile.tma, "warp_specialized": case.specialized,
            "stages": tile.stages, "warps": tile.warps, "registers": report.registers,
            "spill_bytes": report.spill_bytes, "shared_bytes": report.shared_bytes, "tmem_columns": report.tmem_columns,
            "native_mma_instructions": report.count(*MMA[FAMILY[case.chip]]), "native_mma_per_step": multiplies(case),
            "weight_bytes_per_step": tile.rows * per_step * 9 // 16,
            "token_bytes_per_step": tile.tokens * per_step * 9 // 16,
        })  # fmt: skip
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    head = {
        "label": "modelled: read from code compiled by Triton 3.6.0 for chips that are not here; nothing was run",
        "command": "python tests/kernels/test_blackwell_gemm.py",
        "k": K,
    }
    RECORD.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    record()
