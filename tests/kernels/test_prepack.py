"""Prepacked weights hold every code and scale of the weight, at the place that prepack.py states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quads.emulation import formats
from quads.emulation.quantizers import NVFP4Tensor, quantize
from quads.kernels import prepack
from quads.kernels.quantize import PackedNVFP4

# Bit of each half-word where a code's sign and lowest magnitude bit lie (prepack.py).
SIGN, MAGNITUDE = (15, 12, 14, 13), (6, 3, 0, 9)


def weight(n: int, k: int, experts: int = 1) -> tuple[NVFP4Tensor, PackedNVFP4]:
    generator = torch.Generator().manual_seed(n + k)
    q = quantize(torch.randn(experts, n, k, generator=generator) * torch.exp(torch.randn(experts, n, 1)))
    return q, PackedNVFP4(q.packed, q.scales, torch.full((experts,), float(q.outer)))


def unpack_words(codes: Tensor) -> Tensor:
    """Codes of prepacked 8-byte groups [..., 8] in their order along K: [..., 16]."""
    halves = codes.contiguous().view(torch.int16).int() & 0xFFFF  # [..., 4], a half-word holds four codes
    columns = [((halves >> s) & 1) << 3 | (halves >> m) & 7 for s, m in zip(SIGN, MAGNITUDE, strict=True)]
    return torch.stack(columns, dim=-1).flatten(-2)


def rows_of(packed: prepack.HopperWeight) -> tuple[Tensor, Tensor]:
    """Codes [experts, rows, K] and E5M3 scales [experts, rows, K/16] in the order 16 i + 8 h + g of each tile."""
    codes = packed.codes.unflatten(3, (4, 8, 2, 8)).permute(0, 1, 3, 5, 4, 2, 6)  # e, tile, i, h, g, block, byte
    scales = packed.scales.unflatten(3, (8, 4, 2)).permute(0, 1, 4, 5, 3, 2)
    return unpack_words(codes).flatten(1, 4).flatten(2), scales.flatten(1, 4)


@pytest.mark.parametrize("shape", [(64, 64), (100, 48), (1, 16)])
def test_hopper_order_holds_every_code_and_zero_rows_past_n(shape: tuple[int, int]) -> None:
    n, k = shape
    q, packed = weight(n, k)
    codes, _ = rows_of(prepack.prepare_hopper(packed))
    assert torch.equal(codes[:, :n], q.codes.int())
    assert (codes[:, n:] == 0).all()


def test_every_e4m3_scale_keeps_its_value_as_e5m3() -> None:
    scales = torch.arange(1, 127, dtype=torch.uint8).repeat_interleave(1).unsqueeze(1)
    packed = PackedNVFP4(torch.full((126, 8), 0x21, dtype=torch.uint8), scales, torch.tensor(1.0))
    _, e5m3 = rows_of(prepack.prepare_hopper(packed))
    code = e5m3[0, :126, 0].int()
    value = torch.ldexp(1 + (code & 7).double() / 8, (code >> 3) - 10)
    assert torch.equal(value.float(), formats.decode(scales[:, 0], formats.E4M3))


def test_a_zero_scale_clears_the_magnitudes_and_keeps_the_signs() -> None:
    codes = torch.arange(16, dtype=torch.uint8).unsqueeze(0)
    packed = PackedNVFP4(
        codes[:, 0::2] | codes[:, 1::2] << 4, torch.tensor([[0x80]], dtype=torch.uint8), torch.tensor(1.0)
    )
    stored, _ = rows_of(prepack.prepare_hopper(packed))
    assert torch.equal(stored[0, 0], codes[0].int() & 8)


def test_a_nan_scale_is_kept_apart() -> None:
    packed = PackedNVFP4(
        torch.zeros(1, 8, dtype=torch.uint8), torch.tensor([[0x7F]], dtype=torch.uint8), torch.tensor(1.0)
    )
    _, e5m3 = rows_of(prepack.prepare_hopper(packed))
    assert int(e5m3[0, 0, 0]) == 0xFF


def test_interleaving_puts_gate_and_up_rows_of_a_channel_eight_apart() -> None:
    q, packed = weight(2 * 40, 32)
    codes, _ = rows_of(prepack.prepare_hopper(packed, interleave=True))
    tile = codes[0].unflatten(0, (-1, 4, 2, 8))  # tile, i, h, g
    gate, up = tile[:, :, 0].flatten(0, 2), tile[:, :, 1].flatten(0, 2)
    assert torch.equal(gate[:40], q.codes[0, :40].int())
    assert torch.equal(up[:40], q.codes[0, 40:].int())


@pytest.mark.parametrize("shape", [(1, 0, 16), (32, 0, 4), (0, 4, 512), (128, 0, 1024)])
def test_native_scales_lie_in_the_128x4_layout(shape: tuple[int, int, int]) -> None:
    row, block, offset = shape
    scales = torch.zeros(129, 8, dtype=torch.uint8)
    scales[row, block] = 0x38
    packed = PackedNVFP4(torch.zeros(129, 64, dtype=torch.uint8), scales, torch.tensor(1.0))
    stored = prepack.prepare_native(packed).scales[0]
    assert stored.numel() == 256 * 8
    assert stored.nonzero().flatten().tolist() == [offset]


@pytest.mark.parametrize("prepare", [prepack.prepare_hopper, prepack.prepare_native])
def test_rewriting_in_place_keeps_the_storage(prepare: object) -> None:
    assert callable(prepare)
    _, first = weight(70, 48, experts=2)
    _, second = weight(70, 48, experts=2)
    second = PackedNVFP4(second.packed ^ 0x33, second.scales, second.outer * 2)
    kept = prepare(PackedNVFP4(first.packed.clone(), first.scales, first.outer))
    pointers = [getattr(kept, name).data_ptr() for name in ("codes", "scales", "outer")]
    fresh = prepare(second)
    assert prepare(second, out=kept) is kept
    assert pointers == [getattr(kept, name).data_ptr() for name in ("codes", "scales", "outer")]
    assert all(torch.equal(getattr(kept, name), getattr(fresh, name)) for name in ("codes", "scales", "outer"))


@pytest.mark.parametrize("prepare", [prepack.prepare_hopper, prepack.prepare_native])
def test_rewriting_with_another_shape_is_refused(prepare: object) -> None:
    assert callable(prepare)
    _, first = weight(70, 48)
    _, other = weight(200, 48)
    with pytest.raises(ValueError, match="out: holds a weight"):
        prepare(other, out=prepare(first))


def test_an_outer_scale_that_fits_no_expert_is_refused() -> None:
    _, packed = weight(8, 16, experts=3)
    with pytest.raises(ValueError, match="does not fit 3 experts"):
        prepack.prepare_hopper(PackedNVFP4(packed.packed, packed.scales, torch.ones(2)))
