"""The NVFP4 product in Triton: dense or grouped, with RAC's repeated K blocks, on FP4 tensor cores or portable.

Native: `tl.dot_scaled`, which becomes tcgen05.mma kind::mxf4nvf4 (sm_100, sm_103) or mma.sync m16n8k64 mxf4nvf4
(sm_120). The first operand needs 128 rows there, so `SWAP` puts the weight first when tokens are few.
Portable: the same control flow with decoded operands and `tl.dot` in FP32; Triton's interpreter and older chips run it.

Loop bounds are constants because Triton's interpreter cannot take a tensor for one (numpy 2).
Walk of K: steps of BLOCKS scale blocks, ascending, then the repeated blocks in list order; weight codes and scales of
a repeated block are read again at their own place, never copied. Weight scales lie in the 128x4 layout, activation
scales are linear. y = cast(acc * (x_outer * w_outer)).
"""

from __future__ import annotations

import triton
import triton.language as tl

from quads.kernels.bits import e2m1_decode, e4m3_decode


@triton.jit
def _scale_values(scales):
    """FP32 of E4M3 bytes; sign ignored, 0x7F is NaN, as the tensor cores read them."""
    magnitude = scales.to(tl.int32) & 0x7F
    return tl.where(magnitude == 0x7F, float("nan"), e4m3_decode(magnitude))


@triton.jit
def _values(nibbles, scales, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """code * block scale, FP32 [ROWS, 8 BLOCKS], of one nibble of each byte."""
    magnitude = e2m1_decode(nibbles)
    signed = tl.where((nibbles & 8) != 0, -magnitude, magnitude)
    wide = tl.broadcast_to(_scale_values(scales)[:, :, None], (ROWS, BLOCKS, 8))
    return signed * tl.reshape(wide, (ROWS, BLOCKS * 8))


@triton.jit
def _multiply(
    a,
    a_scales,
    b,
    b_scales,
    acc,
    ROWS_A: tl.constexpr,
    ROWS_B: tl.constexpr,
    BLOCKS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """acc + A B^T; packed codes [rows, 8 BLOCKS], scale bytes [rows, BLOCKS]."""
    if NATIVE:
        a_e4m3 = a_scales.to(tl.float8e4nv, bitcast=True)
        b_e4m3 = b_scales.to(tl.float8e4nv, bitcast=True)
        return tl.dot_scaled(a, a_e4m3, "e2m1", b.T, b_e4m3, "e2m1", acc)
    else:
        wide_a, wide_b = a.to(tl.int32), b.to(tl.int32)
        low_a = _values(wide_a & 15, a_scales, ROWS_A, BLOCKS)
        low_b = _values(wide_b & 15, b_scales, ROWS_B, BLOCKS)
        acc = tl.dot(low_a, low_b.T, acc, input_precision="ieee")
        high_a = _values(wide_a >> 4, a_scales, ROWS_A, BLOCKS)
        high_b = _values(wide_b >> 4, b_scales, ROWS_B, BLOCKS)
        return tl.dot(high_a, high_b.T, acc, input_precision="ieee")


@triton.jit
def _tiled_scales(scales, rows, blocks, columns):
    """Pointers into the 128x4 layout of a matrix with `columns` (padded) scales a row."""
    atom = (rows // 128)[:, None].to(tl.int64) * (columns // 4) + (blocks // 4)[None, :]
    within = ((rows % 32) * 16 + (rows % 128) // 32 * 4)[:, None] + (blocks % 4)[None, :]
    return scales + atom * 512 + within


@triton.jit
def _cast(y, ELEMENT: tl.constexpr, NATIVE: tl.constexpr):
    """FP32 to the element type of the result, to nearest even; Triton's interpreter would truncate to bfloat16."""
    if NATIVE or tl.float32 == ELEMENT:
        return y.to(ELEMENT)
    else:
        bits = y.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(y == y, rounded, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _load_rows(at, columns, row_live, column_live):
    """uint8 tile at row pointers `at` [R, 1]; zero where a row or a column is not there."""
    return tl.load(at + columns[None, :], mask=row_live[:, None] & column_live[None, :], other=0)


@triton.jit
def _tile(
    token_block,
    first_row,
    w_desc,
    s_desc,
    x_codes,
    x_scales,
    x_outer,
    w_codes,
    w_scales,
    w_outer,
    blocks,
    out,
    slots,
    groups,
    rows,
    n,
    k_blocks,
    extra,
    slot_share,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STEPS: tl.constexpr,
    EXTRA_STEPS: tl.constexpr,
    SWAP: tl.constexpr,
    NATIVE: tl.constexpr,
    TMA: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    GROUPED: tl.constexpr,
    SELECTED: tl.constexpr,
    HALVES: tl.constexpr,
    OUTER_PER_ROW: tl.constexpr,
):
    padded_rows = tl.cdiv(n, 128) * 128
    scale_columns = tl.cdiv(k_blocks, 4) * 4
    width = k_blocks + extra
    byte = tl.arange(0, BLOCKS * 8)
    step_block = tl.arange(0, BLOCKS)
    slot = token_block * TOKENS + tl.arange(0, TOKENS)
    if GROUPED:
        expert = tl.load(groups + token_block)
        target = tl.load(slots + slot)
    else:
        expert = token_block * 0
        target = tl.where(slot < rows, slot, -1)
    live = target >= 0
    x_row = (tl.where(live, target, 0) // slot_share).to(tl.int64)
    w_row = first_row + tl.arange(0, ROWS)
    w_live = w_row < n
    s_row = expert * padded_rows + w_row
    w_at = w_codes + (expert.to(tl.int64) * n + w_row)[:, None] * (k_blocks * 8)
    x_at = x_codes + x_row[:, None] * (width * 8)
    xs_at = x_scales + x_row[:, None] * width
    acc = tl.zeros((ROWS, TOKENS) if SWAP else (TOKENS, ROWS), dtype=tl.float32)
    for step in tl.range(0, STEPS, warp_specialize=SPECIALIZE):
        first = step * BLOCKS
        inside = (first + step_block) < k_blocks
        bytes_inside = (first * 8 + byte) < k_blocks * 8
        x = _load_rows(x_at, first * 8 + byte, live, bytes_inside)
        xs = _load_rows(xs_at, first + step_block, live, inside)
        if TMA:
            w = w_desc.load([expert * n + first_row, first * 8])
            flat = s_desc.load([0, (expert * padded_rows + first_row) // 128, first // 4, 0, 0])
            parts = tl.reshape(flat, (ROWS // 128, BLOCKS // 4, 32, 4, 4))
            ws = tl.reshape(tl.trans(parts, 0, 3, 2, 1, 4), (ROWS, BLOCKS))
        else:
            w = _load_rows(w_at, first * 8 + byte, w_live, bytes_inside)
            at = _tiled_scales(w_scales, s_row, first + step_block, scale_columns)
            ws = tl.load(at, mask=w_live[:, None] & inside[None, :], other=0)
        if SWAP:
            acc = _multiply(w, ws, x, xs, acc, ROWS, TOKENS, BLOCKS, NATIVE)
        else:
            acc = _multiply(x, xs, w, ws, acc, TOKENS, ROWS, BLOCKS, NATIVE)
    if EXTRA_STEPS > 0:
        list_at = blocks
        if SELECTED:
            list_at += expert * extra
        for step in range(EXTRA_STEPS):
            first = step * BLOCKS
            inside = (first + step_block) < extra
            bytes_inside = (first + byte // 8) < extra
            block = tl.load(list_at + first + step_block, mask=inside, other=0)
            block_of_byte = tl.load(list_at + first + byte // 8, mask=bytes_inside, other=0)
            x = _load_rows(x_at, (k_blocks + first) * 8 + byte, live, bytes_inside)
            xs = _load_rows(xs_at, k_blocks + first + step_block, live, inside)
            w = _load_rows(w_at, block_of_byte * 8 + byte % 8, w_live, bytes_inside)
            at = _tiled_scales(w_scales, s_row, block, scale_columns)
            ws = tl.load(at, mask=w_live[:, None] & inside[None, :], other=0)
            if SWAP:
                acc = _multiply(w, ws, x, xs, acc, ROWS, TOKENS, BLOCKS, NATIVE)
            else:
                acc = _multiply(x, xs, w, ws, acc, TOKENS, ROWS, BLOCKS, NATIVE)
    if OUTER_PER_ROW:
        outer = tl.load(x_outer + x_row, mask=live, other=0.0)
    else:
        outer = tl.load(x_outer) + tl.zeros((TOKENS,), dtype=tl.float32)
    if HALVES:
        outer_w = tl.load(w_outer + expert * 2 + tl.where(w_row < n // 2, 0, 1))
    else:
        outer_w = tl.load(w_outer + expert) + tl.zeros((ROWS,), dtype=tl.float32)
    y = (tl.trans(acc) if SWAP else acc) * (outer[:, None] * outer_w[None, :])
    at = out + tl.where(live, target, 0).to(tl.int64)[:, None] * n + w_row[None, :]
    tl.store(at, _cast(y, out.dtype.element_ty, NATIVE), mask=live[:, None] & w_live[None, :])


@triton.jit
def scaled_product(
    x_codes,  # uint8 [rows, 8 (k_blocks + extra)]
    x_scales,  # uint8 [rows, k_blocks + extra]
    x_outer,  # float32 [] or [rows]
    w_codes,  # uint8 [experts * n, 8 k_blocks]
    w_scales,  # uint8, 128x4 layout, experts padded to whole 128-row tiles
    w_outer,  # float32 [experts] or [experts, 2]
    blocks,  # int32 [extra] or [experts, extra]
    out,  # [rows out, n]
    slots,  # int32 [token_blocks * TOKENS]: output row or -1
    groups,  # int32 [token_blocks]: expert or -1
    rows,
    n,
    k_blocks,
    extra,
    token_blocks,
    experts,
    slot_share,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STEPS: tl.constexpr,
    EXTRA_STEPS: tl.constexpr,
    SWAP: tl.constexpr,
    NATIVE: tl.constexpr,
    TMA: tl.constexpr,
    PERSISTENT: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    GROUPED: tl.constexpr,
    SELECTED: tl.constexpr,
    HALVES: tl.constexpr,  # the two halves of n have their own outer scale (gate, up)
    OUTER_PER_ROW: tl.constexpr,
):
    row_tiles = tl.cdiv(n, ROWS)
    if TMA:
        atoms = tl.cdiv(k_blocks, 4)
        tile_rows = experts * tl.cdiv(n, 128)
        w_desc = tl.make_tensor_descriptor(w_codes, [experts * n, k_blocks * 8], [k_blocks * 8, 1], [ROWS, BLOCKS * 8])
        # As E4M3 from the start: a cast after the transposition keeps the scales from going smem -> TMEM (tcgen05.cp).
        s_desc = tl.make_tensor_descriptor(
            w_scales.to(tl.pointer_type(tl.float8e4nv)),
            [1, tile_rows, atoms, 2, 256],
            [tile_rows * atoms * 512, atoms * 512, 512, 256, 1],
            [1, ROWS // 128, BLOCKS // 4, 2, 256],
        )
    else:
        w_desc = w_codes
        s_desc = w_scales
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), row_tiles * token_blocks, tl.num_programs(0)):
            if not GROUPED or tl.load(groups + tile // row_tiles) >= 0:
                _tile(
                    tile // row_tiles, tile % row_tiles * ROWS, w_desc, s_desc, x_codes, x_scales, x_outer,
                    w_codes, w_scales, w_outer, blocks, out, slots, groups, rows, n, k_blocks, extra, slot_share,
                    TOKENS, ROWS, BLOCKS, STEPS, EXTRA_STEPS, SWAP, NATIVE, TMA, SPECIALIZE, GROUPED, SELECTED, HALVES,
                    OUTER_PER_ROW,
                )  # fmt: skip
    else:
        tile = tl.program_id(0)
        if not GROUPED or tl.load(groups + tile // row_tiles) >= 0:
            _tile(
                tile // row_tiles, tile % row_tiles * ROWS, w_desc, s_desc, x_codes, x_scales, x_outer,
                w_codes, w_scales, w_outer, blocks, out, slots, groups, rows, n, k_blocks, extra, slot_share,
                TOKENS, ROWS, BLOCKS, STEPS, EXTRA_STEPS, SWAP, NATIVE, TMA, SPECIALIZE, GROUPED, SELECTED, HALVES,
                OUTER_PER_ROW,
            )  # fmt: skip
