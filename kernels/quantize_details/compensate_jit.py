"""Kernel 2: quantise with residual compensation.

The output row is the K-augmented operand: K/16 blocks of codes, then one block of residual codes for each selected
block, in the order of the list. Block lists are int32 [T, S], one row for each `tile_rows` rows of x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quads.kernels.bits import e4m3_decode
from quads.kernels.quantize_details.encode_jit import (
    fast_range,
    half_amax,
    load_raw,
    raw_magnitudes,
    raw_signs,
)
from quads.kernels.quantize_details.quantize_jit import encode_exact, half_pointers, store_words
from quads.kernels.quantize_details.residual_jit import encode_residual, residual_half, squares


@triton.jit
def load_tile(x, row, block, stride, inside, ELEMENT: tl.constexpr):
    """Raw halves (l0, l1, h0, h1) of the blocks (row, block)."""
    lower, upper = half_pointers(x, row, block, stride)
    l0, l1 = load_raw(lower, ELEMENT, inside)
    h0, h1 = load_raw(upper, ELEMENT, inside)
    return l0, l1, h0, h1


@triton.jit
def encode_raw(l0, l1, h0, h1, g, ELEMENT: tl.constexpr, FAST: tl.constexpr, NATIVE: tl.constexpr):
    """(scale codes, lower words, upper words) of raw halves."""
    le, lo = raw_magnitudes(l0, l1, ELEMENT)
    he, ho = raw_magnitudes(h0, h1, ELEMENT)
    amax = tl.maximum(half_amax(le, lo), half_amax(he, ho))
    ls = raw_signs(l0, l1, ELEMENT)
    hs = raw_signs(h0, h1, ELEMENT)
    return encode_exact(le, lo, ls, he, ho, hs, amax, g, FAST, NATIVE)


@triton.jit
def residual_tile(l0, l1, h0, h1, scale, first, second, g, ELEMENT: tl.constexpr, FAST: tl.constexpr):
    """R of a tile whose codes are known: (le, lo, he, ho), FP32 [B, 4] each."""
    s = e4m3_decode(scale)
    le, lo = residual_half(l0, l1, first, s, g, ELEMENT, FAST)
    he, ho = residual_half(h0, h1, second, s, g, ELEMENT, FAST)
    return le, lo, he, ho


@triton.jit
def both_codes(l0, l1, h0, h1, g, ELEMENT: tl.constexpr, FAST: tl.constexpr, NATIVE: tl.constexpr):
    """Codes of a tile and codes of its residual: two times (scale codes, lower words, upper words)."""
    scale, first, second = encode_raw(l0, l1, h0, h1, g, ELEMENT, FAST, NATIVE)
    le, lo, he, ho = residual_tile(l0, l1, h0, h1, scale, first, second, g, ELEMENT, FAST)
    r_scale, r_first, r_second = encode_residual(le, lo, he, ho, g, FAST, NATIVE)
    return scale, first, second, r_scale, r_first, r_second


@triton.jit
def codes_and_scores(
    l0, l1, h0, h1, g, unit, ELEMENT: tl.constexpr, FAST: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """Codes of a tile and the score of each block: (scale codes, lower words, upper words, int64 [B])."""
    scale, first, second = encode_raw(l0, l1, h0, h1, g, ELEMENT, FAST, NATIVE)
    le, lo, he, ho = residual_tile(l0, l1, h0, h1, scale, first, second, g, ELEMENT, FAST)
    score = squares(le, unit, FAST) + squares(lo, unit, FAST) + squares(he, unit, FAST) + squares(ho, unit, FAST)
    return scale, first, second, score


@triton.jit
def score_unit(largest, FAST: tl.constexpr):
    """2^(10-E), or 2^-E if not FAST, for 2^E <= largest < 2^(E+1) (a normal FP32 number)."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    bits = (127 + 10 * FAST - exponent) << 23
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def store_block(packed, scales, row, column, columns, scale, first, second, inside):
    """Codes and scale of block `column` of the augmented operand [rows, columns]."""
    store_words(packed, row, column, columns, first, second, inside)
    tl.store(scales + row.to(tl.int64) * columns + column, scale.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["rows", "tile_rows"])  # batches of any size: one compilation
def scores_kernel(
    x, packed, scales, outer, largest, scores, rows, blocks, columns, stride, tile_rows,
    B: tl.constexpr, STEPS: tl.constexpr, TOKEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Main codes of up to STEPS rows of one tile and B blocks, and their scores added to scores [T, blocks].

    Grid: (chunks of B blocks, groups of STEPS rows in a tile, tiles). `largest` [T]: largest outer scale of a tile.
    """
    ELEMENT: tl.constexpr = x.dtype.element_ty
    tile = tl.program_id(2)
    block = tl.program_id(0) * B + tl.arange(0, B)
    top = tl.load(largest + tile)
    total = tl.zeros((B,), tl.int64)
    first_row = tile * tile_rows + tl.program_id(1) * STEPS
    last_row = tl.minimum(tl.minimum(first_row + STEPS, (tile + 1) * tile_rows), rows)
    for step in range(STEPS):
        at = first_row + step
        row = at + tl.zeros((B,), tl.int32)
        inside = (block < blocks) & (at < last_row)
        g0 = tl.load(outer + (at if TOKEN else 0), mask=at < last_row, other=1.0)
        g = tl.full((B,), 1.0, tl.float32) * g0
        l0, l1, h0, h1 = load_tile(x, row, block, stride, inside, ELEMENT)
        if fast_range(g0) * fast_range(top) > 0:
            unit = tl.full((B,), 1.0, tl.float32) * score_unit(top, True)
            scale, first, second, score = codes_and_scores(l0, l1, h0, h1, g, unit, ELEMENT, True, NATIVE)
        else:
            unit = tl.full((B,), 1.0, tl.float32) * score_unit(top, False)
            scale, first, second, score = codes_and_scores(l0, l1, h0, h1, g, unit, ELEMENT, False, NATIVE)
        store_block(packed, scales, row, block, columns, scale, first, second, inside)
        total += tl.maximum(score, 0)  # negative only of NaN, which must not choose for the other rows
    tl.atomic_add(scores + tile.to(tl.int64) * blocks + block, total, mask=block < blocks)


@triton.jit
def selection(scores, valid, count):
    """(selected, position): the `count` largest of scores >= 0 (int64 [B]), ties to the lower index.

    position: rank of a selected block by index; of another block, `count` plus its rank among the others. A score that
    NaN made negative counts as 0, so that `count` blocks are always there: a list is an index into memory.
    """
    key = tl.where(valid, tl.maximum(scores, 0), -1)
    threshold = tl.zeros((1,), tl.int64)
    for bit in range(63):
        candidate = threshold | (tl.full((1,), 1 << 62, tl.int64) >> bit)
        enough = tl.sum((key >= candidate).to(tl.int32), axis=0) >= count
        threshold = tl.where(enough, candidate, threshold)
    above = key > threshold
    tied = key == threshold
    room = count - tl.sum(above.to(tl.int32), axis=0)
    selected = above | (tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= room))
    chosen = (selected & valid & (count > 0)).to(tl.int32)
    rest = (1 - chosen) * valid.to(tl.int32)
    position = tl.where(chosen > 0, tl.cumsum(chosen, axis=0) - 1, count + tl.cumsum(rest, axis=0) - 1)
    return chosen > 0, position


@triton.jit
def select_kernel(scores, lists, blocks, count, B: tl.constexpr):
    """lists [T, count]: the selected blocks of each row of scores [T, blocks], ascending."""
    tile = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, B)
    valid = block < blocks
    score = tl.load(scores + tile * blocks + block, mask=valid, other=-1)
    selected, position = selection(score, valid, count)
    tl.store(lists + tile * count + position, block, mask=selected)


@triton.jit
def order_kernel(listed, member, order, blocks, count, B: tl.constexpr, S: tl.constexpr):
    """order [blocks]: the `count` listed blocks, then the others ascending. One program; `member` [blocks] is zero."""
    block = tl.arange(0, B)
    item = tl.arange(0, S)
    chosen = tl.load(listed + item, mask=item < count, other=0)
    tl.store(member + chosen, 1, mask=item < count)
    tl.store(order + item, chosen, mask=item < count)
    tl.debug_barrier()
    rest = 1 - tl.load(member + block, mask=block < blocks, other=1)
    tl.store(order + count + tl.cumsum(rest, axis=0) - 1, block, mask=rest > 0)


@triton.jit(do_not_specialize=["rows", "tile_rows"])
def listed_kernel(
    x, packed, scales, outer, order, rows, blocks, count, columns, stride, tile_rows, order_stride,
    ROWS: tl.constexpr, ITEMS: tl.constexpr, TOKEN: tl.constexpr, MAIN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Blocks by list: the first `count` entries of `order` get residual codes (and main codes with MAIN).

    With MAIN the other entries get main codes alone, in programs of their own. Each program: ROWS rows x ITEMS
    entries, one entry a lane, so that every block of x is read once.
    """
    ELEMENT: tl.constexpr = x.dtype.element_ty
    heavy = tl.cdiv(count, ITEMS)
    light = tl.cdiv(blocks - count, ITEMS) if MAIN else 0
    chunk = tl.program_id(0) % (heavy + light)
    index = tl.arange(0, ROWS * ITEMS)
    first_row = (tl.program_id(0) // (heavy + light)) * ROWS
    row = first_row + index // ITEMS
    item = (chunk if chunk < heavy else chunk - heavy) * ITEMS + index % ITEMS
    item += 0 if chunk < heavy else count
    inside = (row < rows) & (item < (count if chunk < heavy else blocks))
    block = tl.load(order + (row // tile_rows).to(tl.int64) * order_stride + item, mask=inside, other=0)
    if TOKEN and ROWS > 1:
        g = tl.load(outer + row, mask=row < rows, other=1.0)
        fast = tl.min(fast_range(g), axis=0)
    else:
        g0 = tl.load(outer + (first_row if TOKEN else 0))
        g = tl.full((ROWS * ITEMS,), 1.0, tl.float32) * g0
        fast = fast_range(g0)
    l0, l1, h0, h1 = load_tile(x, row, block, stride, inside, ELEMENT)
    if chunk < heavy:
        if fast:
            scale, first, second, rs, r1, r2 = both_codes(l0, l1, h0, h1, g, ELEMENT, True, NATIVE)
        else:
            scale, first, second, rs, r1, r2 = both_codes(l0, l1, h0, h1, g, ELEMENT, False, NATIVE)
        store_block(packed, scales, row, blocks + item, columns, rs, r1, r2, inside)
        if MAIN:
            store_block(packed, scales, row, block, columns, scale, first, second, inside)
    elif MAIN:
        if fast:
            scale, first, second = encode_raw(l0, l1, h0, h1, g, ELEMENT, True, NATIVE)
        else:
            scale, first, second = encode_raw(l0, l1, h0, h1, g, ELEMENT, False, NATIVE)
        store_block(packed, scales, row, block, columns, scale, first, second, inside)


@triton.jit
def listed_row_kernel(
    x, packed, scales, outer, rank, blocks, columns, stride, B: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """One row a program: its outer scale amax / 2688 (written), its codes, and residual codes of the listed blocks.

    rank [blocks]: place of a block in the list, negative where it is not listed. Every block's residual is encoded,
    which costs few rows less than a pass that finds the outer scales first.
    """
    ELEMENT: tl.constexpr = x.dtype.element_ty
    at = tl.program_id(0)
    block = tl.arange(0, B)
    inside = block < blocks
    row = at + tl.zeros((B,), tl.int32)
    place = tl.load(rank + block, mask=inside, other=-1)
    l0, l1, h0, h1 = load_tile(x, row, block, stride, inside, ELEMENT)
    le, lo = raw_magnitudes(l0, l1, ELEMENT)
    he, ho = raw_magnitudes(h0, h1, ELEMENT)
    amax = tl.max(tl.maximum(half_amax(le, lo), half_amax(he, ho)), axis=0)
    g0 = tl.where(amax > 0, tl.div_rn(amax, 2688.0), 1.0)
    tl.store(outer + at, g0)
    g = tl.full((B,), 1.0, tl.float32) * g0
    if fast_range(g0) > 0:
        scale, first, second, rs, r1, r2 = both_codes(l0, l1, h0, h1, g, ELEMENT, True, NATIVE)
    else:
        scale, first, second, rs, r1, r2 = both_codes(l0, l1, h0, h1, g, ELEMENT, False, NATIVE)
    store_block(packed, scales, row, block, columns, scale, first, second, inside)
    store_block(packed, scales, row, blocks + place, columns, rs, r1, r2, inside & (place >= 0))


@triton.jit
def token_kernel(
    x, packed, scales, outer, lists, blocks, count, columns, stride,
    B: tl.constexpr, TOKEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One row a program, in registers throughout: codes, scores, its own selection, residual codes."""
    ELEMENT: tl.constexpr = x.dtype.element_ty
    at = tl.program_id(0)
    block = tl.arange(0, B)
    inside = block < blocks
    row = at + tl.zeros((B,), tl.int32)
    g0 = tl.load(outer + (at if TOKEN else 0))
    g = tl.full((B,), 1.0, tl.float32) * g0
    l0, l1, h0, h1 = load_tile(x, row, block, stride, inside, ELEMENT)
    if fast_range(g0) > 0:
        unit = tl.full((B,), 1.0, tl.float32) * score_unit(g0, True)
        scale, first, second, score = codes_and_scores(l0, l1, h0, h1, g, unit, ELEMENT, True, NATIVE)
        le, lo, he, ho = residual_tile(l0, l1, h0, h1, scale, first, second, g, ELEMENT, True)
        rs, r1, r2 = encode_residual(le, lo, he, ho, g, True, NATIVE)
    else:
        unit = tl.full((B,), 1.0, tl.float32) * score_unit(g0, False)
        scale, first, second, score = codes_and_scores(l0, l1, h0, h1, g, unit, ELEMENT, False, NATIVE)
        le, lo, he, ho = residual_tile(l0, l1, h0, h1, scale, first, second, g, ELEMENT, False)
        rs, r1, r2 = encode_residual(le, lo, he, ho, g, False, NATIVE)
    store_block(packed, scales, row, block, columns, scale, first, second, inside)
    selected, position = selection(score, inside, count)
    store_block(packed, scales, row, blocks + position, columns, rs, r1, r2, selected)
    tl.store(lists + at.to(tl.int64) * count + position, block, mask=selected)
