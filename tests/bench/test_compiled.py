"""What compiled.json says: complete, without problems, and equal to what the compiler says here."""

from __future__ import annotations

import pytest

from quads.bench import compiled, issue
from quads.bench.specs import chips
from quads.kernels.crosscompile import compile_jobs
from quads.kernels.quantize_details.compiled import KERNELS, job


@pytest.mark.parametrize("target", sorted({chip.target for chip in chips().values()}))
def test_every_quantiser_is_counted_for_every_chip(target: str) -> None:
    for kernel in KERNELS:
        row = compiled.quantizer(kernel, target)
        assert row["problems"] == []
        assert row["longest_an_element"] >= row["instructions_an_element"] > 4


def test_hardware_conversions_shorten_the_quantiser() -> None:
    hopper, blackwell = (compiled.quantizer("quantize", target) for target in ("sm_90a", "sm_100a"))
    assert blackwell["native_e2m1_conversions"] > 0 == hopper["native_e2m1_conversions"]
    assert blackwell["instructions_an_element"] < hopper["instructions_an_element"]


def test_a_residual_costs_instructions_in_every_product() -> None:
    for way, target in (("decode", "sm_90a"), ("wide", "sm_90a"), ("native", "sm_100a"), ("native", "sm_120a")):
        plain, rac = (compiled.product(way, target, 16, residual=residual) for residual in (False, True))
        total = [row["instructions_a_step"] + (row.get("repeated") or 0) for row in (plain, rac)]
        assert total[1] > total[0], way


def test_the_smallest_block_that_holds_the_tokens_is_taken() -> None:
    assert [compiled.product("decode", "sm_90a", m, residual=False)["tokens"] for m in (1, 8, 9, 32, 99)] == [
        8, 8, 16, 32, 32
    ]  # fmt: skip


@pytest.mark.parametrize("tokens", compiled.HOPPER_WIDTHS)
def test_a_chunk_with_a_residual_costs_less_than_two_without(tokens: int) -> None:
    plain, rac = (compiled.product("grouped", "sm_90a", tokens, residual=r, grouped=True) for r in (False, True))
    assert plain["repeated"] is None
    assert rac["instructions_a_step"] < rac["repeated"] < 2 * plain["instructions_a_step"]


def test_more_warps_share_the_decoding_of_a_round() -> None:
    four, eight = (compiled.product("grouped", "sm_90a", 8, residual=False, grouped=True, warps=w) for w in (4, 8))
    assert (four["rows"], eight["rows"]) == (256, 512)
    assert eight["instructions_a_step"] < four["instructions_a_step"]


@pytest.mark.slow
def test_the_stored_counts_of_the_grouped_product_are_what_the_compiler_says() -> None:
    pytest.importorskip("triton")
    rows = list(compiled._rounds(8, True))
    assert {row["warps"] for row in rows} == {4, 8}
    assert all(row in compiled._document()["products"] for row in rows)


def test_what_was_not_compiled_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="kernel 'dance' was not compiled for sm_90a"):
        compiled.quantizer("dance", "sm_90a")
    with pytest.raises(ValueError, match="no native product was compiled for sm_90a"):
        compiled.product("native", "sm_90a", 1, residual=False)


@pytest.mark.full
def test_the_stored_counts_are_what_the_compiler_says() -> None:
    found = compiled.compile_all()
    assert found == {name: compiled._document()[name] for name in found}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_the_stored_count_of_the_quantiser_is_what_the_compiler_says(target: str) -> None:
    pytest.importorskip("triton")
    [report] = compile_jobs([job("quantize", target)])
    elements = 16 * 256 / 64  # of a thread
    assert issue.through_stores(report.sass)[0] / elements == pytest.approx(
        compiled.quantizer("quantize", target)["instructions_an_element"], abs=0.005
    )
