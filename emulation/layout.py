"""Byte layouts: packed codes, block-scale layouts, and the offsets of grouped (MoE) operands.

Packing: byte j of a row holds element 2j in its low nibble and element 2j+1 in its high nibble, the order of
torch.float4_e2m1fn_x2, vLLM, FlashInfer, Transformer Engine, torchao, ModelOpt and compressed-tensors.

Block scales [M, B] (B = K/16) are `linear` on disk, row-major. Tensor cores read them swizzled, B padded to
a multiple of 4 (Bp) and M to whole row tiles, the padding zero bytes:
    128x4   offset(m, b) = (m//128 * Bp/4 + b//4) * 512 + (m%32) * 16 + (m%128)//32 * 4 + b%4
    8x4     offset(m, b) = (m//8 * Bp/4 + b//4) * 32 + (m%8) * 4 + b%4          (TensorRT-LLM, small M)
Grouped: rows of codes are packed tightly, but the scales of each expert start on a row tile of their own.
Sources: CUTLASS SfAtom ((32,4),(16,4)):((16,4),(0,1)); cuBLAS "1D block scaling factors layout"; vLLM, FlashInfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

_COLUMNS = 4


@dataclass(frozen=True)
class ScaleLayout:
    """A swizzled block-scale layout by its row tile: `rows` in `rows // 32` (or one) interleaved strips."""

    name: str
    rows: int
    strips: int


LAYOUT_128X4 = ScaleLayout("128x4", rows=128, strips=4)
LAYOUT_8X4 = ScaleLayout("8x4", rows=8, strips=1)
LAYOUTS = {layout.name: layout for layout in (LAYOUT_128X4, LAYOUT_8X4)}


def pack(codes: Tensor) -> Tensor:
    """Pack `codes` (uint8 nibbles, [..., K], K even) into bytes [..., K/2]."""
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes have dtype {codes.dtype}: nibbles to pack are uint8")
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(f"codes of shape {tuple(codes.shape)}: the last dimension must be even to pack nibbles")
    low, high = codes[..., 0::2], codes[..., 1::2]
    return low | (high << 4)


def unpack(packed: Tensor) -> Tensor:
    """Inverse of `pack`: bytes [..., K/2] to nibbles [..., K]."""
    if packed.dtype != torch.uint8:
        raise ValueError(f"packed codes have dtype {packed.dtype}: packed nibbles are uint8 (view the tensor so)")
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def padded_shape(rows: int, blocks: int, layout: ScaleLayout = LAYOUT_128X4) -> tuple[int, int]:
    """Rows and columns of the swizzled form of [rows, blocks] scales, padding included; its size is their product."""
    return _up(rows, layout.rows), _up(blocks, _COLUMNS)


def swizzle(scales: Tensor, layout: ScaleLayout = LAYOUT_128X4) -> Tensor:
    """Bytes [..., M, B] (uint8, linear) to [..., Mp, Bp] whose row-major order is `layout`; padding is zero."""
    _check_scales(scales)
    rows, blocks = scales.shape[-2:]
    padded_rows, padded_blocks = padded_shape(rows, blocks, layout)
    padded = torch.zeros(*scales.shape[:-2], padded_rows, padded_blocks, dtype=torch.uint8, device=scales.device)
    padded[..., :rows, :blocks] = scales
    strip = layout.rows // layout.strips
    tiles = padded.unflatten(-1, (-1, _COLUMNS)).unflatten(-3, (-1, layout.strips, strip))
    return tiles.movedim(-2, -4).transpose(-2, -3).reshape(padded.shape)


def unswizzle(swizzled: Tensor, rows: int, blocks: int, layout: ScaleLayout = LAYOUT_128X4) -> Tensor:
    """Inverse of `swizzle`: [..., Mp, Bp] (or any shape of that many bytes) to linear [..., rows, blocks].

    Padding is dropped unread, so poison in it cannot leak.
    """
    _check_scales(swizzled)
    shape = padded_shape(rows, blocks, layout)
    lead = swizzled.shape[:-2]
    if swizzled.shape[-2:].numel() != shape[0] * shape[1]:
        raise ValueError(
            f"swizzled scales of shape {tuple(swizzled.shape)}: [{rows}, {blocks}] in layout {layout.name} "
            f"takes {shape[0]} x {shape[1]} bytes"
        )
    strip = layout.rows // layout.strips
    tiles = swizzled.reshape(*lead, -1, shape[1] // _COLUMNS, strip, layout.strips, _COLUMNS)
    return tiles.transpose(-2, -3).movedim(-4, -2).reshape(*lead, *shape)[..., :rows, :blocks]


def offset(row: int, block: int, blocks: int, layout: ScaleLayout = LAYOUT_128X4) -> int:
    """Byte at which the scale of (`row`, `block`) lies in the swizzled form of a matrix `blocks` wide."""
    tile = row // layout.rows * (_up(blocks, _COLUMNS) // _COLUMNS) + block // _COLUMNS
    strip = layout.rows // layout.strips
    inside = row % strip * layout.strips * _COLUMNS + row % layout.rows // strip * _COLUMNS + block % _COLUMNS
    return tile * layout.rows * _COLUMNS + inside


@dataclass(frozen=True)
class GroupOffsets:
    """First row of each expert, and past the last: in the packed codes and in the swizzled scales. E + 1 entries."""

    rows: list[int]
    scale_rows: list[int]


def group_offsets(counts: list[int], layout: ScaleLayout = LAYOUT_128X4) -> GroupOffsets:
    """Offsets of experts with `counts` rows each; an expert without rows takes no space in either."""
    if not counts or min(counts) < 0:
        raise ValueError(f"expert row counts {counts}: needs at least one expert, and no negative count")
    padded = [_up(count, layout.rows) for count in counts]
    return GroupOffsets([0, *accumulate(counts)], [0, *accumulate(padded)])


def swizzle_grouped(scales: Tensor, counts: list[int], layout: ScaleLayout = LAYOUT_128X4) -> Tensor:
    """Scales [sum of counts, B] of all experts in order to [padded rows, Bp], each from a row tile of its own."""
    _check_scales(scales)
    offsets = group_offsets(counts, layout)
    if scales.ndim != 2 or scales.shape[0] != offsets.rows[-1]:
        raise ValueError(f"scales of shape {tuple(scales.shape)}: expert row counts add up to {offsets.rows[-1]}")
    parts = [swizzle(part, layout) for part in scales.split(counts) if part.shape[0]]
    return torch.cat(parts) if parts else scales.new_zeros(0, _up(scales.shape[1], _COLUMNS))


def unswizzle_grouped(swizzled: Tensor, counts: list[int], blocks: int, layout: ScaleLayout = LAYOUT_128X4) -> Tensor:
    """Inverse of `swizzle_grouped`: [sum of counts, blocks]."""
    _check_scales(swizzled)
    offsets = group_offsets(counts, layout)
    if swizzled.shape != (offsets.scale_rows[-1], _up(blocks, _COLUMNS)):
        raise ValueError(
            f"swizzled scales of shape {tuple(swizzled.shape)}: experts of {counts} rows take "
            f"{offsets.scale_rows[-1]} x {_up(blocks, _COLUMNS)} bytes in layout {layout.name}"
        )
    starts = offsets.scale_rows
    parts = [swizzled[starts[e] : starts[e + 1]] for e in range(len(counts)) if counts[e]]
    linear = [unswizzle(part, n, blocks, layout) for part, n in zip(parts, filter(None, counts), strict=True)]
    return torch.cat(linear) if linear else swizzled.new_zeros(0, blocks)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _check_scales(scales: Tensor) -> None:
    if scales.dtype != torch.uint8 or scales.ndim < 2:
        raise ValueError(f"scales of shape {tuple(scales.shape)}, dtype {scales.dtype}: needs uint8 bytes [..., M, B]")
