"""Kernel 3: quantise and dequantise in place of the value. A program holds ROWS x BLOCKS blocks (see encode_jit)."""

from __future__ import annotations

import triton
import triton.language as tl

from quads.kernels.bits import e2m1_magic, e4m3_decode, round_to
from quads.kernels.quantize_details.encode_jit import (
    block_scale,
    divide,
    fast_range,
    half_amax,
    load_raw,
    raw_magnitudes,
    raw_values,
    step_reciprocal,
)
from quads.kernels.quantize_details.quantize_jit import half_pointers


@triton.jit
def requantize(magnitude, x, scale, outer, step, head, tail, FAST: tl.constexpr):
    """Q(x), FP32 [B, 4]: fl(fl(q * s) * g) with the sign of x. `scale` and `outer` as in `dequantize_word`."""
    code = e2m1_magic(divide(magnitude, step, head, tail, FAST)).to(tl.int32, bitcast=True)
    q = (code << 22).to(tl.float32, bitcast=True)  # q * 2^-126; the bits of the magic number leave the word
    if FAST:
        value = q * (scale * 1.2676506002282294e30)[:, None] * (outer * 67108864.0)[:, None]  # 2^100, 2^26
    else:
        value = q * 8.507059173023462e37 * scale[:, None] * outer[:, None]  # 2^126
    sign = x.to(tl.int32, bitcast=True) & (-2147483648)
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def requantize_tile(
    l0, l1, h0, h1, amax, g, ELEMENT: tl.constexpr, FAST: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """Q of a tile of raw halves with block maxima `amax`: le, lo, he, ho, FP32 [B, 4] each."""
    code = block_scale(amax, g, FAST, NATIVE)
    scale = e4m3_decode(code)
    step = scale * g
    head, tail = step_reciprocal(step, FAST)
    le, lo = raw_values(l0, l1, ELEMENT)
    he, ho = raw_values(h0, h1, ELEMENT)
    return (
        requantize(tl.abs(le), le, scale, g, step, head, tail, FAST),
        requantize(tl.abs(lo), lo, scale, g, step, head, tail, FAST),
        requantize(tl.abs(he), he, scale, g, step, head, tail, FAST),
        requantize(tl.abs(ho), ho, scale, g, step, head, tail, FAST),
    )


@triton.jit
def store_half(out, row, block, blocks, HALF: tl.constexpr, even, odd, inside):
    """Eight values, interleaved and rounded to the type of `out` [rows, 16 * blocks]."""
    values = round_to(tl.reshape(tl.join(even, odd), (even.shape[0], 8)), out.dtype.element_ty)
    start = (row.to(tl.int64) * blocks + block) * 16 + HALF * 8
    tl.store(out + start[:, None] + tl.arange(0, 8)[None, :], values, mask=inside[:, None])


@triton.jit
def fake_quantize_kernel(
    x, out, outer, rows, blocks, stride, rows_of_outer,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, SQUARE: tl.constexpr, MANY: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """out = Q(x), contiguous [rows, 16 * blocks].

    `outer` is one scale or, with MANY, one for each `rows_of_outer` rows. SQUARE: one block scale per 16x16 (ROWS is
    16, and rows a multiple of 16 or the last tile shorter).
    """
    ELEMENT: tl.constexpr = x.dtype.element_ty
    tiles = tl.cdiv(blocks, BLOCKS)
    first_row = (tl.program_id(0) // tiles) * ROWS
    index = tl.arange(0, ROWS * BLOCKS)
    row = first_row + index // BLOCKS
    block = (tl.program_id(0) % tiles) * BLOCKS + index % BLOCKS
    inside = (row < rows) & (block < blocks)
    lower, upper = half_pointers(x, row, block, stride)
    l0, l1 = load_raw(lower, ELEMENT, inside)
    h0, h1 = load_raw(upper, ELEMENT, inside)
    le, lo = raw_magnitudes(l0, l1, ELEMENT)
    he, ho = raw_magnitudes(h0, h1, ELEMENT)
    amax = tl.maximum(half_amax(le, lo), half_amax(he, ho))
    if SQUARE:
        shared = tl.max(tl.reshape(amax, (ROWS, BLOCKS)), axis=0)
        amax = tl.reshape(tl.broadcast_to(shared[None, :], (ROWS, BLOCKS)), (ROWS * BLOCKS,))
    if MANY and ROWS > 1:
        g = tl.load(outer + row // rows_of_outer, mask=row < rows, other=1.0)
        fast = tl.min(fast_range(g), axis=0)
    else:
        g0 = tl.load(outer + (first_row // rows_of_outer if MANY else 0))
        g = tl.full((ROWS * BLOCKS,), 1.0, tl.float32) * g0
        fast = fast_range(g0)
    if fast:
        le, lo, he, ho = requantize_tile(l0, l1, h0, h1, amax, g, ELEMENT, True, NATIVE)
    else:
        le, lo, he, ho = requantize_tile(l0, l1, h0, h1, amax, g, ELEMENT, False, NATIVE)
    store_half(out, row, block, blocks, 0, le, lo, inside)
    store_half(out, row, block, blocks, 1, he, ho, inside)
