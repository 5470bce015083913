"""The way back from the kernels' order gives every byte of a weight again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quads import qdq, recipes
from quads.emulation import formats
from quads.emulation.quantizers import BLOCK
from quads.kernels import prepack
from quads.kernels.prepack_details import hopper_order
from quads.kernels.quantize import PackedNVFP4

Prepare = Callable[[PackedNVFP4, bool], Any]
ORDERS: dict[str, Prepare] = {
    "hopper": lambda w, gated: prepack.prepare_hopper(w, interleave=gated),
    "native": lambda w, gated: prepack.prepare_native(w, halves=gated),
}
EVERY_SCALE = torch.arange(127, dtype=torch.uint8)


def differences(prepare: Prepare, weight: PackedNVFP4, *, gated: bool = False) -> list[str]:
    """The fields of `weight` that do not come back byte for byte."""
    back = prepack.exported(prepare(weight, gated))
    outer = weight.outer.unsqueeze(1).expand(-1, 2) if gated else weight.outer
    wanted = {"packed": weight.packed, "scales": weight.scales, "outer": outer}
    return [name for name, tensor in wanted.items() if not torch.equal(getattr(back, name), tensor)]


def every_byte_under_every_scale(rows: Tensor) -> PackedNVFP4:
    """Eight experts [N, 512]: row n has the scale `rows[n]` in all blocks; each code byte at each of eight places."""
    places = torch.arange(8).unsqueeze(1)
    codes = ((torch.arange(256) + places) % 256).to(torch.uint8).unsqueeze(1).expand(8, len(rows), 256)
    scales = rows.unsqueeze(1).expand(8, len(rows), 32).contiguous()
    return PackedNVFP4(hopper_order.cleared(codes, scales), scales, torch.rand(8) + 0.5)


@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("gated", [False, True])
def test_every_code_byte_comes_back_from_every_place_under_every_scale(order: str, gated: bool) -> None:
    rows = torch.cat([EVERY_SCALE, EVERY_SCALE[:1]]) if gated else EVERY_SCALE  # 127 and 128: no whole tiles
    weight = every_byte_under_every_scale(torch.cat([rows, rows.flip(0)]) if gated else rows)
    assert differences(ORDERS[order], weight, gated=gated) == []


@given(
    st.sampled_from(list(ORDERS)),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 150),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
)
def test_any_weight_comes_back(order: str, gated: bool, experts: int, n: int, blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (experts, 2 * n if gated else n)
    scales = torch.randint(0, 127, (*shape, blocks), generator=generator, dtype=torch.uint8)
    scales[torch.rand(scales.shape, generator=generator) < 0.2] = 0
    codes = torch.randint(0, 256, (*shape, blocks * BLOCK // 2), generator=generator, dtype=torch.uint8)
    weight = PackedNVFP4(hopper_order.cleared(codes, scales), scales, torch.rand(experts, generator=generator) + 0.5)
    assert differences(ORDERS[order], weight, gated=gated) == []


def test_gate_and_up_keep_their_own_outer_scales() -> None:
    weight = every_byte_under_every_scale(torch.cat([EVERY_SCALE, EVERY_SCALE]))
    outer = torch.rand(8, 2)
    for prepare in ORDERS.values():
        assert torch.equal(prepack.exported(prepare(replace(weight, outer=outer), True)).outer, outer)


def test_a_nan_scale_comes_back_as_one() -> None:
    scales = torch.full((1, 64, 1), 0x7F, dtype=torch.uint8)
    weight = PackedNVFP4(torch.full((1, 64, 8), 0x5A, dtype=torch.uint8), scales, torch.ones(1))
    assert differences(ORDERS["hopper"], weight) == []


def test_under_a_zero_scale_the_signs_come_back_and_no_value_changes() -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 32, 8)
    weight = PackedNVFP4(codes, torch.zeros(1, 32, 1, dtype=torch.uint8), torch.ones(1))
    back = prepack.exported(prepack.prepare_hopper(weight))
    assert torch.equal(back.packed, codes & 0x88)
    assert torch.equal(back.packed, hopper_order.cleared(codes, weight.scales))
    assert torch.equal(values(back.packed).view(torch.int32), values(codes).view(torch.int32))


def values(packed: Tensor) -> Tensor:
    """Codes times a zero scale: zeros with signs."""
    nibbles = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
    return formats.decode(nibbles, formats.E2M1) * 0.0


@pytest.mark.parametrize("changes", [{}, {"weight_block": "16x16"}, {"block_rule": "four_over_six"}])
@pytest.mark.parametrize("exponent", [-133, -60, 0, 120])
def test_our_quantiser_never_puts_a_magnitude_under_a_zero_scale(changes: dict[str, str], exponent: int) -> None:
    """Every bfloat16 value as the largest of a block, beside outer scales small and large: nothing is ever cleared."""
    recipe = recipes.load("quads").replace(**changes)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = torch.cat([every[every.isfinite()], torch.zeros(16).bfloat16()])  # a 16x16 tile of zeros, too
    weight = finite.unsqueeze(1) * torch.linspace(-1, 1, BLOCK).bfloat16()
    outer = torch.ldexp(torch.tensor(1.1), torch.tensor(exponent))
    packed = qdq.pack(weight, recipe, outer)
    zero = packed.scales == 0
    assert bool(zero.any())
    assert bool((~zero).any())
    assert torch.equal(packed.packed, hopper_order.cleared(packed.packed, packed.scales))


FAULTS: dict[str, tuple[str, Any]] = {
    "a bit moved to a wrong place": ("_MOVES_BACK", ((0x8000, -13), *hopper_order._MOVES_BACK[1:])),
    "gate and up swapped": ("_rows", lambda x, n, gated: _rows(x.flip(2) if gated else x, n, gated)),
    "rows of a tile swapped": ("_rows", lambda x, n, gated: _rows(x.flip(4), n, gated)),
    "one scale off by one": ("_e4m3_table", lambda: [code + (code == 90) for code in _e4m3_table()]),
}
_rows, _e4m3_table = hopper_order._rows, hopper_order._e4m3_table


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_order, *FAULTS[fault])
    weight = every_byte_under_every_scale(torch.cat([EVERY_SCALE, EVERY_SCALE.flip(0)]))
    assert differences(ORDERS["hopper"], weight, gated=True) != []


def test_a_native_scale_in_the_place_of_its_neighbour_is_seen() -> None:
    def misplaced(weight: PackedNVFP4, gated: bool) -> prepack.NativeWeight:
        native = prepack.prepare_native(weight, halves=gated)
        return replace(native, scales=native.scales.roll(16, dims=1))

    weight = every_byte_under_every_scale(EVERY_SCALE)
    assert differences(misplaced, weight) == ["scales"]
