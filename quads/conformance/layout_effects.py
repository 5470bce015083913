"""Order and extent that quantisers get wrong: signs, nibbles, layouts, padding, tails. Names as in faults.toml."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quads.conformance import protocol as contract
from quads.conformance.protocol import Quantized
from quads.conformance.reference import Question, Reference, correct
from quads.emulation import layout
from quads.emulation.dialects import BLOCK


def _codes_changed(change: Callable[[Tensor], Tensor], q: Question) -> Quantized:
    right = correct(q)
    return Quantized(change(right.codes), right.scales, right.padding, right.outer)


def _swapped(codes: Tensor) -> Tensor:
    return codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _planar(codes: Tensor) -> Tensor:
    """Low nibbles hold the first half of a row, high nibbles the second."""
    return torch.stack(codes.chunk(2, dim=-1), dim=-1).flatten(-2)


def _unsigned(codes: Tensor) -> Tensor:
    return codes & 7


def _sign_low(codes: Tensor) -> Tensor:
    return ((codes & 7) << 1) | (codes >> 3)


def _two_complement(codes: Tensor) -> Tensor:
    return torch.where(codes >= 8, (16 - (codes & 7)) & 15, codes)


def _scales_changed(change: Callable[[Tensor], Tensor], q: Question) -> Quantized:
    right = correct(q)
    return Quantized(right.codes, change(right.scales), right.padding, right.outer)


def _from_neighbour(scales: Tensor) -> Tensor:
    return scales.roll(1, dims=-1)


def _transposed(scales: Tensor) -> Tensor:
    return scales.mT.reshape(scales.shape)


def _relaid(write: Callable[[Tensor, Question], Tensor], q: Question) -> Quantized:
    """Scale bytes written in the wrong order, read in the protocol's; where the sizes differ the fault cannot be."""
    right = correct(q)
    rows, blocks = right.scales.shape
    if q.protocol.layout == "linear":
        raw = write(right.scales, q).reshape(-1)[: right.scales.numel()].reshape(rows, blocks)
        return Quantized(right.codes, raw, right.padding, right.outer)
    shape = layout.padded_shape(rows, blocks, layout.LAYOUTS[q.protocol.layout])
    raw = write(right.scales, q).reshape(-1)
    size = shape[0] * shape[1]
    raw = torch.nn.functional.pad(raw, (0, max(0, size - raw.numel())))[:size].reshape(shape)
    scales, padding = contract.read_scales(raw, rows, blocks, q.protocol)
    return Quantized(right.codes, scales, padding, right.outer)


def _padded(scales: Tensor, q: Question) -> Tensor:
    if q.protocol.layout == "linear":
        return scales
    rows, blocks = layout.padded_shape(scales.shape[0], scales.shape[1], layout.LAYOUTS[q.protocol.layout])
    return torch.nn.functional.pad(scales, (0, blocks - scales.shape[1], 0, rows - scales.shape[0]))


def _linear(scales: Tensor, q: Question) -> Tensor:
    return _padded(scales, q)


def _linear_unpadded(scales: Tensor, q: Question) -> Tensor:
    return scales


def _swizzled_twice(scales: Tensor, q: Question) -> Tensor:
    form = layout.LAYOUTS.get(q.protocol.layout, layout.LAYOUT_128X4)
    return layout.swizzle(layout.swizzle(scales, form), form)


def _as_layout(name: str, scales: Tensor, q: Question) -> Tensor:
    return layout.swizzle(scales, layout.LAYOUTS[name])


def _stale(q: Question) -> Quantized:
    right = correct(q)
    rows, blocks = right.scales.shape
    _, padding = contract.read_scales(contract.write_scales(right.scales, q.protocol), rows, blocks, q.protocol)
    return Quantized(right.codes, right.scales, torch.full_like(padding, 0x7F), right.outer)


def _tail(multiple: int, q: Question) -> Quantized:
    """K beyond the last multiple is left zero, codes and scales."""
    right = correct(q)
    kept = right.codes.shape[-1] // multiple * multiple
    codes, scales = right.codes.clone(), right.scales.clone()
    codes[..., kept:] = 0
    scales[..., kept // BLOCK :] = 0
    return Quantized(codes, scales, right.padding, right.outer)


def _row_tail(multiple: int, q: Question) -> Quantized:
    """Rows beyond the last multiple are left zero."""
    right = correct(q)
    kept = right.codes.shape[0] // multiple * multiple
    codes, scales = right.codes.clone(), right.scales.clone()
    codes[kept:] = 0
    scales[kept:] = 0
    return Quantized(codes, scales, right.padding, right.outer)


EFFECTS: dict[str, Reference] = {
    "code-sign-lost": partial(_codes_changed, _unsigned),
    "code-sign-low": partial(_codes_changed, _sign_low),
    "code-two-complement": partial(_codes_changed, _two_complement),
    "nibbles-swapped": partial(_codes_changed, _swapped),
    "nibbles-planar": partial(_codes_changed, _planar),
    "scale-of-neighbour": partial(_scales_changed, _from_neighbour),
    "scales-column-major": partial(_scales_changed, _transposed),
    "scales-linear": partial(_relaid, _linear),
    "scales-linear-unpadded": partial(_relaid, _linear_unpadded),
    "scales-swizzled-twice": partial(_relaid, _swizzled_twice),
    "scales-128x4": partial(_relaid, partial(_as_layout, "128x4")),
    "scales-8x4": partial(_relaid, partial(_as_layout, "8x4")),
    "stale-padding": _stale,
    "tail-32-dropped": partial(_tail, 32),
    "tail-64-dropped": partial(_tail, 64),
    "tail-128-dropped": partial(_tail, 128),
    "rows-32-dropped": partial(_row_tail, 32),
    "rows-128-dropped": partial(_row_tail, 128),
}
