"""The large products on Hopper in Triton: bf16 operands through TMA, wgmma, alpha in FP32 before the cast.

Both walk K ascending, in steps of 16. The dense one is persistent over output tiles. The grouped one has a program for
each, of a row block of one expert, in the order of the experts: those that run at one time share few weights in L2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from quads.kernels.bits import INTERPRETED, round_to


@triton.jit
def product(
    x_desc,
    w_desc,
    y_desc,
    x_outer,
    w_outer,
    M,
    N,
    K,
    OUTER_PER_ROW: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
    SUBTILE: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    alpha_w = tl.load(w_outer)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        band = tile // (GROUP * tiles_n)
        height = min(tiles_m - band * GROUP, GROUP)
        row = (band * GROUP + (tile % (GROUP * tiles_n)) % height) * BM
        column = (tile % (GROUP * tiles_n)) // height * BN
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, tl.cdiv(K, BK)):
            x = x_desc.load([row, k * BK])
            w = w_desc.load([column, k * BK])
            acc = tl.dot(x, w.T, acc)
        if OUTER_PER_ROW:
            rows = row + tl.arange(0, BM)
            alpha = tl.load(x_outer + rows, mask=rows < M, other=0.0) * alpha_w
            y = acc * alpha[:, None]
        else:
            y = acc * (tl.load(x_outer) * alpha_w)
        if SUBTILE:
            halves = tl.permute(tl.reshape(y, (BM, 2, BN // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            y_desc.store([row, column], left.to(y_desc.dtype))
            y_desc.store([row, column + BN // 2], right.to(y_desc.dtype))
        else:
            y_desc.store([row, column], y.to(y_desc.dtype))


@triton.jit
def _swiglu(gate, up):
    """silu(gate) * up, silu(v) = v / (1 + exp(-v)), all in FP32 with CUDA's expf and a rounded division."""
    if INTERPRETED:
        power = tl.exp(-gate)
    else:
        power = libdevice.exp(-gate)
    return tl.div_rn(gate, 1.0 + power) * up


@triton.jit
def _scatter(out, slot, columns, width, y):
    """Store rows of y [rows, columns] in bfloat16 at row `slot`; none where it is -1, nor columns past `width`."""
    at = out + tl.maximum(slot, 0).to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(at, round_to(y, tl.bfloat16), mask=(slot >= 0)[:, None] & (columns < width)[None, :])


@triton.jit
def _grouped_tile(
    row,
    column,
    expert,
    x_desc,
    w_desc,
    out,
    slots,
    x_outer,
    w_outer,
    n,
    share,
    STEPS: tl.constexpr,
    OUTER_PER_ROW: tl.constexpr,
    SWIGLU: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(STEPS):
        x = x_desc.load([row, k * BK])
        w = w_desc.load([expert * n + column, k * BK])
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
    slot = tl.load(slots + row + tl.arange(0, BM))
    if OUTER_PER_ROW:
        outer = tl.load(x_outer + slot // share, mask=slot >= 0, other=0.0)
    else:
        outer = tl.load(x_outer) + tl.zeros((BM,), dtype=tl.float32)
    half = tl.arange(0, BN // 2)
    if SWIGLU:
        gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
        gate *= (outer * tl.load(w_outer + 2 * expert))[:, None]
        up *= (outer * tl.load(w_outer + 2 * expert + 1))[:, None]
        y = _swiglu(round_to(gate, tl.bfloat16).to(tl.float32), round_to(up, tl.bfloat16).to(tl.float32))
        _scatter(out, slot, column // 2 + half, n // 2, y)
    else:  # in two halves: the way to the store goes through shared memory
        alpha = (outer * tl.load(w_outer + expert))[:, None]
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        _scatter(out, slot, column + half, n, left * alpha)
        _scatter(out, slot, column + BN // 2 + half, n, right * alpha)


@triton.jit
def grouped_product(
    x_desc,  # [row blocks * BM, K]
    x_half_desc,  # the same in tiles of BM / 2 rows
    w_desc,  # [experts * n, K]
    out,  # bfloat16 [rows out, n], or [rows out, n / 2] (SwiGLU)
    slots,  # int32 [row blocks * BM]: output row or -1
    groups,  # int32 [row blocks]: expert or -1
    x_outer,  # float32 [] or [rows]
    w_outer,  # float32 [experts], or [experts, 2] (SwiGLU)
    n,
    share,
    STEPS: tl.constexpr,  # of K; a constant, since Triton's interpreter takes no tensor for a loop bound
    OUTER_PER_ROW: tl.constexpr,
    SWIGLU: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,  # row blocks that take turns at one tile of columns
):
    tiles_n = tl.cdiv(n, BN)
    tile, row_blocks = tl.program_id(0), tl.num_programs(0) // tiles_n
    band = tile // (BAND * tiles_n)
    height = min(row_blocks - band * BAND, BAND)
    block = band * BAND + tile % (BAND * tiles_n) % height
    column = tile % (BAND * tiles_n) // height * BN
    expert = tl.load(groups + block)
    if expert >= 0:
        if tl.load(slots + block * BM + BM // 2) < 0:  # slots fill a block from its front: half the work will do
            _grouped_tile(
                block * BM, column, expert, x_half_desc, w_desc, out, slots, x_outer, w_outer,
                n, share, STEPS, OUTER_PER_ROW, SWIGLU, BM // 2, BN, BK,
            )  # fmt: skip
        else:
            _grouped_tile(
                block * BM, column, expert, x_desc, w_desc, out, slots, x_outer, w_outer,
                n, share, STEPS, OUTER_PER_ROW, SWIGLU, BM, BN, BK,
            )  # fmt: skip
