"""Counted bytes and FLOPs, worked by hand."""

from __future__ import annotations

from quads.bench import counts


def test_quantising_reads_two_bytes_and_writes_nine_sixteenths_of_one() -> None:
    assert counts.quantize(16) == 32 + 8 + 1


def test_a_second_pass_reads_the_selected_blocks_and_their_codes_again() -> None:
    once = counts.quantize_rac(32, 0.5, second_pass=False)
    assert once == 64 + 16 + 2 + 9
    assert counts.quantize_rac(32, 0.5, second_pass=True) - once == 16 * 2 + 9


def test_a_product_reads_both_operands_and_writes_bfloat16() -> None:
    moved, flops = counts.gemm(2, 3, 16, "nvfp4", "nvfp4")
    assert moved == 2 * 9 + 3 * 9 + 2 * 3 * 2
    assert flops == 2 * 2 * 3 * 16


def test_columns_that_rac_adds_are_executed_but_their_weight_is_read_once() -> None:
    plain, more = counts.gemm(2, 3, 32, "nvfp4", "nvfp4"), counts.gemm(2, 3, 32, "nvfp4", "nvfp4", extra=16)
    assert more[0] - plain[0] == 2 * 9
    assert more[1] == 1.5 * plain[1]


def test_a_layer_reads_the_weights_of_the_experts_it_uses() -> None:
    moved, flops = counts.moe(1, 2, 2, 16, 16, "nvfp4")
    assert moved == 2 * 3 * 16 * 9 + 16 * 4
    assert flops == 2 * 3 * 2 * 16 * 16
