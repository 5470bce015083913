"""Kernel 1: quantise rows. One program holds ROWS x BLOCKS blocks (ROWS * BLOCKS = B) in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from quads.kernels.bits import e4m3_decode
from quads.kernels.quantize_details.encode_jit import (
    block_scale,
    block_scale_vllm,
    encode_half,
    encode_half_vllm,
    fast_range,
    half_amax,
    load_raw,
    raw_magnitudes,
    raw_signs,
    step_reciprocal,
)


@triton.jit
def half_pointers(x, row, block, stride):
    """int32 pointers [B] to both halves of the blocks (row, block); `stride` is the row stride in 32-bit words."""
    WORDS: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 4  # of a half block
    start = x.to(tl.pointer_type(tl.int32)) + (row.to(tl.int64) * stride + block * (2 * WORDS))
    return start, start + WORDS


@triton.jit
def scale_offset(row, block, columns, SWIZZLED: tl.constexpr):
    """Byte offset of a block scale: linear [M, columns], or the 128x4 layout with `columns` a multiple of 4."""
    if SWIZZLED:
        atom = (row // 128).to(tl.int64) * (columns // 4) + block // 4
        return atom * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + block % 4
    else:
        return row.to(tl.int64) * columns + block


@triton.jit
def store_words(packed, row, block, blocks, first, second, inside):
    """Both words of each block, eight bytes, to packed int32 [rows, 2 * blocks]."""
    target = (row.to(tl.int64) * blocks + block)[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(packed + target, tl.join(first, second), mask=inside[:, None])


@triton.jit
def encode_exact(le, lo, ls, he, ho, hs, amax, outer, FAST: tl.constexpr, NATIVE: tl.constexpr):
    """(scale codes, lower words, upper words) of a tile in the exact dialect, [B] each."""
    scale = block_scale(amax, outer, FAST, NATIVE)
    step = e4m3_decode(scale) * outer
    head, tail = step_reciprocal(step, FAST)
    first = encode_half(le, lo, ls, step, head, tail, FAST, NATIVE)
    second = encode_half(he, ho, hs, step, head, tail, FAST, NATIVE)
    return scale, first, second


@triton.jit(do_not_specialize=["rows", "scale_rows"])  # batches of any size: one compilation
def quantize_kernel(
    x, packed, scales, outer, rows, blocks, scale_rows, scale_columns, stride,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, TOKEN: tl.constexpr, AMAX: tl.constexpr,
    SWIZZLED: tl.constexpr, VLLM: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of `x` [rows, 16 * blocks].

    `outer` is read ([] or, with TOKEN, [rows]); with AMAX (TOKEN, and BLOCKS >= blocks) it is computed and written.
    Scales are written up to [scale_rows, scale_columns], zero outside `x`.
    """
    ELEMENT: tl.constexpr = x.dtype.element_ty
    tiles = tl.cdiv(scale_columns, BLOCKS)
    row_tile = tl.program_id(0) // tiles
    index = tl.arange(0, ROWS * BLOCKS)
    row = row_tile * ROWS + index // BLOCKS
    block = (tl.program_id(0) % tiles) * BLOCKS + index % BLOCKS
    inside = (row < rows) & (block < blocks)
    lower, upper = half_pointers(x, row, block, stride)
    l0, l1 = load_raw(lower, ELEMENT, inside)
    h0, h1 = load_raw(upper, ELEMENT, inside)
    le, lo = raw_magnitudes(l0, l1, ELEMENT)
    he, ho = raw_magnitudes(h0, h1, ELEMENT)
    ls = raw_signs(l0, l1, ELEMENT)
    hs = raw_signs(h0, h1, ELEMENT)
    amax = tl.maximum(half_amax(le, lo), half_amax(he, ho))
    if AMAX:
        row_amax = tl.max(tl.reshape(amax, (ROWS, BLOCKS)), axis=1)
        of_row = tl.where(row_amax > 0, tl.div_rn(row_amax, 2688.0), 1.0)
        own = row_tile * ROWS + tl.arange(0, ROWS)
        tl.store(outer + own, of_row, mask=own < rows)
        g = tl.reshape(tl.broadcast_to(of_row[:, None], (ROWS, BLOCKS)), (ROWS * BLOCKS,))
        fast = tl.min(fast_range(of_row), axis=0)
    elif ROWS > 1 and TOKEN:
        g = tl.load(outer + row, mask=row < rows, other=1.0)
        fast = tl.min(fast_range(g), axis=0)
    else:
        shared = tl.load(outer + (row_tile if TOKEN else 0), mask=row_tile * ROWS < rows, other=1.0)
        g = tl.full((ROWS * BLOCKS,), 1.0, tl.float32) * shared
        fast = fast_range(shared)
    if VLLM:
        scale, factor = block_scale_vllm(amax, g, NATIVE)
        first = encode_half_vllm(le, lo, ls, factor, NATIVE)
        second = encode_half_vllm(he, ho, hs, factor, NATIVE)
    elif fast:
        scale, first, second = encode_exact(le, lo, ls, he, ho, hs, amax, g, True, NATIVE)
    else:
        scale, first, second = encode_exact(le, lo, ls, he, ho, hs, amax, g, False, NATIVE)
    store_words(packed, row, block, blocks, first, second, inside)
    owned = (row < scale_rows) & (block < scale_columns)
    tl.store(scales + scale_offset(row, block, scale_columns, SWIZZLED), scale.to(tl.uint8), mask=owned)


@triton.jit
def row_outer_kernel(x, outer, columns, stride, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    """outer [rows]: amax / 2688 of each row of x, 1 where amax is 0 (or Inf, of a row that nobody reads)."""
    row = tl.program_id(0)
    best = tl.zeros((WIDTH,), tl.float32)
    for step in range(STEPS):
        column = step * WIDTH + tl.arange(0, WIDTH)
        value = tl.load(x + row.to(tl.int64) * stride + column, mask=column < columns, other=0.0)
        best = tl.maximum(best, tl.abs(value.to(tl.float32)))
    amax = tl.max(best, axis=0)
    tl.store(outer + row, tl.where((amax > 0) & (amax < float("inf")), tl.div_rn(amax, 2688.0), 1.0))


@triton.jit
def amax_kernel(x, amax_bits, count, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    """Atomic maximum of |x| over `count` contiguous elements, as the bits of an FP32 (monotone as an integer)."""
    start = tl.program_id(0).to(tl.int64) * (WIDTH * STEPS)
    best = tl.zeros((WIDTH,), tl.float32)
    for step in tl.static_range(STEPS):
        offset = start + step * WIDTH + tl.arange(0, WIDTH)
        value = tl.load(x + offset, mask=offset < count, other=0.0).to(tl.float32)
        best = tl.maximum(best, tl.abs(value))
    tl.atomic_max(amax_bits, tl.max(best, axis=0).to(tl.int32, bitcast=True))
