"""Layouts as exact inverses, against the offset formula element by element, with poisoned padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quads.emulation import layout
from quads.emulation.layout import LAYOUT_8X4, LAYOUT_128X4, LAYOUTS, ScaleLayout

SHAPES = [(1, 1), (1, 29), (5, 688), (127, 4), (128, 4), (129, 5), (257, 29), (8, 3), (9, 8)]
every_layout = pytest.mark.parametrize("scale_layout", LAYOUTS.values(), ids=lambda item: item.name)


def numbered(*shape: int) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 251 + 1).to(torch.uint8).reshape(shape)


def test_the_even_element_is_the_low_nibble() -> None:
    assert layout.pack(torch.tensor([1, 7], dtype=torch.uint8)).tolist() == [0x71]


@given(st.integers(0, 4), st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_unpack_inverts_pack(rows: int, pairs: int, seed: int) -> None:
    codes = torch.randint(0, 16, (rows, 2 * pairs), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    assert torch.equal(layout.unpack(layout.pack(codes)), codes)


def test_pack_inverts_unpack_on_every_byte() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(layout.pack(layout.unpack(packed)), packed)


def test_a_transposed_tensor_packs_as_its_copy() -> None:
    codes = numbered(6, 8).t() & 15
    assert torch.equal(layout.pack(codes), layout.pack(codes.contiguous()))


@every_layout
@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_every_scale_lies_at_its_offset_and_padding_is_zero(scale_layout: ScaleLayout, rows: int, blocks: int) -> None:
    scales = numbered(rows, blocks)
    flat = layout.swizzle(scales, scale_layout).flatten()
    at = torch.tensor([[layout.offset(m, b, blocks, scale_layout) for b in range(blocks)] for m in range(rows)])
    assert len(at.unique()) == rows * blocks
    assert torch.equal(flat[at], scales)
    assert (flat != 0).sum() == rows * blocks


@every_layout
@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_unswizzle_inverts_swizzle_and_never_reads_padding(scale_layout: ScaleLayout, rows: int, blocks: int) -> None:
    scales = numbered(rows, blocks)
    swizzled = layout.swizzle(scales, scale_layout)
    poisoned = torch.where(swizzled == 0, 0x7F, swizzled)
    for form in (swizzled, poisoned, poisoned.flatten().unsqueeze(0)):
        assert torch.equal(layout.unswizzle(form, rows, blocks, scale_layout), scales)


def test_the_128x4_offsets_of_the_published_check_values() -> None:
    assert [layout.offset(m, b, 8) for m, b in ((1, 0), (32, 0), (0, 4), (128, 0))] == [16, 4, 512, 1024]


@pytest.mark.parametrize(
    ("rows", "k", "size"),
    [(1, 464, 128 * 32), (5, 11008, 88_064), (127, 11008, 88_064), (128, 11008, 88_064), (129, 11008, 176_128)],
)
def test_buffer_sizes(rows: int, k: int, size: int) -> None:
    padded = layout.padded_shape(rows, k // 16)
    assert padded[0] * padded[1] == size


def test_the_128x4_layout_is_torchaos() -> None:
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils", reason="needs torchao (extra: oracles)")
    for rows, blocks in SHAPES:
        scales = numbered(rows, blocks)
        assert torch.equal(layout.swizzle(scales).flatten(), utils.to_blocked(scales).flatten())


def test_leading_dimensions_are_swizzled_one_by_one() -> None:
    scales = numbered(3, 2, 130, 5)
    together = layout.swizzle(scales)
    assert torch.equal(together[2, 1], layout.swizzle(scales[2, 1]))
    assert torch.equal(layout.unswizzle(together, 130, 5), scales)


COUNTS = [0, 3, 128, 0, 129, 1, 0]


def test_grouped_offsets_of_ragged_and_empty_experts() -> None:
    offsets = layout.group_offsets(COUNTS)
    assert offsets.scale_rows == [0, 0, 128, 256, 256, 512, 640, 640]
    assert offsets.rows == [0, 0, 3, 131, 131, 260, 261, 261]


@every_layout
@given(st.lists(st.integers(0, 140), min_size=1, max_size=5), st.integers(1, 9))
def test_grouped_swizzle_is_the_swizzle_of_each_expert_and_is_inverted(
    scale_layout: ScaleLayout, counts: list[int], blocks: int
) -> None:
    scales = numbered(sum(counts), blocks)
    grouped = layout.swizzle_grouped(scales, counts, scale_layout)
    offsets = layout.group_offsets(counts, scale_layout)
    for expert, count in enumerate(counts):
        part = grouped[offsets.scale_rows[expert] : offsets.scale_rows[expert + 1]]
        rows = scales[offsets.rows[expert] : offsets.rows[expert] + count]
        assert torch.equal(part, layout.swizzle(rows, scale_layout) if count else part[:0])
    assert torch.equal(layout.unswizzle_grouped(grouped, counts, blocks, scale_layout), scales)


def test_a_nan_scale_in_one_expert_stays_there() -> None:
    counts = [128, 128]
    scales = torch.full((256, 16), 0x38, dtype=torch.uint8)
    scales[:128] = 0x7F
    grouped = layout.swizzle_grouped(scales, counts)
    assert (grouped[128:] == 0x38).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layout.pack(torch.zeros(2, 3, dtype=torch.uint8)), r"shape \(2, 3\): the last dimension must be even"),
        (lambda: layout.pack(torch.zeros(2, 4)), "dtype torch.float32: nibbles to pack are uint8"),
        (lambda: layout.unpack(torch.zeros(2, 4)), "dtype torch.float32: packed nibbles are uint8"),
        (lambda: layout.swizzle(torch.zeros(2, 4)), r"shape \(2, 4\), dtype torch.float32: needs uint8"),
        (
            lambda: layout.swizzle(torch.zeros(4, dtype=torch.uint8)),
            r"shape \(4,\).*needs uint8 bytes",
        ),
        (lambda: layout.unswizzle(numbered(128, 4), 129, 4), r"\[129, 4\] in layout 128x4 takes 256 x 4 bytes"),
        (lambda: layout.group_offsets([]), "needs at least one expert"),
        (lambda: layout.group_offsets([2, -1]), "no negative count"),
        (lambda: layout.swizzle_grouped(numbered(4, 4), [1, 2]), "expert row counts add up to 3"),
        (lambda: layout.unswizzle_grouped(numbered(128, 4), [1, 2], 4), "take 256 x 4 bytes in layout 128x4"),
    ],
)
def test_bad_input_names_shape_and_rule(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_no_rows_take_no_bytes() -> None:
    assert layout.swizzle(numbered(0, 5), LAYOUT_128X4).shape == (0, 8)
    assert layout.swizzle(numbered(0, 5), LAYOUT_8X4).shape == (0, 8)
    assert layout.swizzle_grouped(numbered(0, 5), [0, 0]).shape == (0, 8)
    assert layout.unswizzle_grouped(numbered(0, 8), [0, 0], 5).shape == (0, 5)
    assert layout.pack(numbered(0, 16)).shape == (0, 8)
