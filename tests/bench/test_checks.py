"""The checks before a timing catch planted faults: a wrong code, a wrong scale, a product beyond its bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quads.bench import checks, drawn
from quads.emulation import gemm, quantizers, residual
from quads.emulation.quantizers import NVFP4Tensor
from quads.kernels.compensate import RacOperand
from quads.kernels.quantize import PackedNVFP4

X = torch.randn(100, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def packed(x: torch.Tensor = X) -> PackedNVFP4:
    q = quantizers.quantize(x)
    return PackedNVFP4(q.packed, q.scales, q.outer)


def compensated() -> RacOperand:
    q, blocks = quantizers.quantize(X), torch.tensor([1, 3])
    second = residual.quantize_residual(X, q, blocks)
    codes, scales = torch.cat([q.packed, second.packed], -1), torch.cat([q.scales, second.scales], -1)
    return RacOperand(codes, scales, q.outer, blocks.int())


def flipped(t: torch.Tensor, row: int, column: int) -> torch.Tensor:
    changed = t.clone()
    changed[row, column] ^= 1
    return changed


def test_right_bytes_pass() -> None:
    assert checks.same_as_emulator(X, packed()) == 0.0
    assert checks.same_residual(X, compensated()) == 0.0


@pytest.mark.parametrize("part", ["packed", "scales"])
@pytest.mark.parametrize("row", [0, 99])
def test_one_wrong_byte_is_counted(part: str, row: int) -> None:
    got = packed()
    wrong = replace(got, **{part: flipped(getattr(got, part), row, 2)})
    with pytest.raises(AssertionError, match=r"1 of \d+ bytes differ"):
        checks.same_as_emulator(X, wrong)


@pytest.mark.parametrize(("part", "column"), [("packed", 33), ("scales", 5)])
def test_one_wrong_byte_of_the_residual_is_counted(part: str, column: int) -> None:
    got = compensated()
    wrong = replace(got, **{part: flipped(getattr(got, part), 5, column)})
    with pytest.raises(AssertionError, match=r"1 of \d+ bytes differ"):
        checks.same_residual(X, wrong)


def test_a_wrong_value_is_counted() -> None:
    outer = quantizers.outer_scale(X)
    values = quantizers.dequantize(quantizers.quantize(X), X.dtype)
    assert checks.same_values(X, outer, "1x16", values) == 0.0
    values[0, 0] += 1
    with pytest.raises(AssertionError, match="values"):
        checks.same_values(X, outer, "1x16", values)


def test_boundary_rows_hold_each_amax_and_elements_at_every_boundary() -> None:
    rows = checks.boundary_rows().float()
    assert rows.abs().amax(1).tolist() == [2 + i / 64 for i in range(128)]
    assert rows.shape[1] == 16 * (1 + 11 * 128)


def product(blocks: torch.Tensor | None) -> tuple[PackedNVFP4, PackedNVFP4, torch.Tensor]:
    torch.manual_seed(1)
    extra = 0 if blocks is None else len(blocks)
    a = drawn.packed(5, 4 + extra, per_row=True, device="cpu")
    w = drawn.packed(7, 4, per_row=False, device="cpu")
    wide = drawn.values(w)
    if blocks is not None:
        wide = torch.cat([wide, wide.unflatten(1, (-1, 16))[:, blocks.long()].flatten(1)], 1)
    return a, w, (drawn.values(a) @ wide.T * a.outer.double() * w.outer.double()).float()


@pytest.mark.parametrize("blocks", [None, torch.tensor([0, 2], dtype=torch.int32)])
def test_a_product_off_by_more_than_its_bound_is_seen(blocks: torch.Tensor | None) -> None:
    a, w, y = product(blocks)
    assert drawn.product_error(a, w, blocks, lambda: y) < 0.1
    off = y.clone()
    off[2, 3] *= 1.01
    assert drawn.product_error(a, w, blocks, lambda: off) > 1


def test_nan_in_a_product_is_seen() -> None:
    a, w, y = product(None)
    y[0, 0] = torch.nan
    assert drawn.product_error(a, w, None, lambda: y) == torch.inf


def test_the_values_of_packed_codes_are_the_emulators() -> None:
    q = quantizers.quantize(X)
    assert torch.equal(drawn.values(PackedNVFP4(q.packed, q.scales, q.outer)).float(), quantizers.unscaled(q))


def test_half_of_the_blocks_are_distinct_and_ascending() -> None:
    blocks = drawn.half_of(256, device="cpu").tolist()
    assert len(blocks) == 8
    assert blocks == sorted(set(blocks))


def test_a_peer_that_computes_something_else_is_over_its_bound() -> None:
    y = torch.randn(4, 4)
    assert drawn.relative_error(lambda: y, y, 0.05) == 0.0
    assert drawn.relative_error(lambda: 2 * y, y, 0.05) == pytest.approx(20)


def test_emulated_words_that_are_not_mmasims_are_seen() -> None:
    pytest.importorskip("mmasim")
    from quads.bench.cases_emulator import operand, words_error

    a, b = operand("quantized", 128, 64, 1), operand("quantized", 128, 64, 2)
    y = gemm.matmul(a, b)
    assert words_error(a, b, y) == 0.0
    with pytest.raises(AssertionError, match="FP32 words"):
        words_error(a, b, y.nextafter(torch.tensor(torch.inf)))


def test_without_mmasim_the_words_are_held_to_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    from quads.bench import cases_emulator

    monkeypatch.setattr(cases_emulator.peers, "missing_mmasim", lambda: "needs mmasim")
    a: NVFP4Tensor = cases_emulator.operand("quantized", 16, 64, 1)
    y = gemm.matmul(a, a)
    assert cases_emulator.words_error(a, a, y) < 1
    assert cases_emulator.words_error(a, a, y * 1.01) > 1
