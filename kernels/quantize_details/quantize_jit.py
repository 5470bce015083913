"""Kernel 1: quantise rows. One program holds ROWS x BLOCKS blocks (ROWS * BLOCKS = B) in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from quads.kernels.quantize_details.encode_jit import block_amax, encode_tile, fast_range


@triton.jit
def load_tile(x, row, block, stride, inside):
    """Lower and upper half [B, 8] of the blocks (row, block) of `x`, as FP32; zeros outside."""
    start = row.to(tl.int64) * stride + block * 16
    pointer = x + start[:, None] + tl.arange(0, 8)[None, :]
    low = tl.load(pointer, mask=inside[:, None], other=0.0)
    high = tl.load(pointer + 8, mask=inside[:, None], other=0.0)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def scale_offset(row, block, columns, SWIZZLED: tl.constexpr):
    """Byte offset of a block scale: linear [M, columns], or the 128x4 layout with `columns` a multiple of 4."""
    if SWIZZLED:
        atom = (row // 128).to(tl.int64) * (columns // 4) + block // 4
        return atom * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + block % 4
    else:
        return row.to(tl.int64) * columns + block


@triton.jit
def quantize_kernel(
    x, packed, scales, outer, rows, blocks, scale_rows, scale_columns, stride,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, TOKEN: tl.constexpr, AMAX: tl.constexpr,
    SWIZZLED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of `x` [rows, 16 * blocks].

    `outer` is read ([] or, with TOKEN, [rows]); with AMAX (TOKEN, and BLOCKS >= blocks) it is computed and written.
    Scales are written up to [scale_rows, scale_columns], zero outside `x`.
    """
    tiles = tl.cdiv(scale_columns, BLOCKS)
    program = tl.program_id(0)
    index = tl.arange(0, ROWS * BLOCKS)
    row = (program // tiles) * ROWS + index // BLOCKS
    block = (program % tiles) * BLOCKS + index % BLOCKS
    inside = (row < rows) & (block < blocks)
    low, high = load_tile(x, row, block, stride, inside)
    if AMAX:
        amax = tl.max(tl.reshape(block_amax(low, high), (ROWS, BLOCKS)), axis=1)
        of_row = tl.where(amax > 0, tl.div_rn(amax, 2688.0), 1.0)
        first = (program // tiles) * ROWS + tl.arange(0, ROWS)
        tl.store(outer + first, of_row, mask=first < rows)
        scale = tl.reshape(tl.broadcast_to(of_row[:, None], (ROWS, BLOCKS)), (ROWS * BLOCKS,))
    elif TOKEN:
        scale = tl.load(outer + row, mask=row < rows, other=1.0)
    else:
        scale = tl.full((ROWS * BLOCKS,), 1.0, tl.float32) * tl.load(outer)
    if fast_range(scale):
        code, words = encode_tile(low, high, scale, True, NATIVE)
    else:
        code, words = encode_tile(low, high, scale, False, NATIVE)
    target = (row.to(tl.int64) * blocks + block)[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(packed + target, words, mask=inside[:, None])
    owned = (row < scale_rows) & (block < scale_columns)
    tl.store(scales + scale_offset(row, block, scale_columns, SWIZZLED), code.to(tl.uint8), mask=owned)


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
