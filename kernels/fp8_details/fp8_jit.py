"""Kernel 6: E4M3 quantisers with 128-wide scales, and the block-scaled product where torch has none."""

from __future__ import annotations

import triton
import triton.language as tl

from quads.kernels.bits import e4m3_decode, e4m3_encode, round_to


@triton.jit
def fp8_quantize_kernel(
    x, codes, scales, rows, k, stride, groups,
    ROWS: tl.constexpr, SHARED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Codes [rows, k] and scales of ROWS x 128 tiles: one each row, [rows, groups], or (SHARED) one each tile."""
    group = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = group * 128 + tl.arange(0, 128)
    inside = (row[:, None] < rows) & (column[None, :] < k)
    value = tl.load(x + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(value), axis=1)
    if SHARED:
        amax = tl.max(amax, axis=0) + tl.zeros((ROWS,), tl.float32)
    scale = tl.div_rn(amax, tl.full((ROWS,), 448.0, tl.float32))
    scale = tl.where(scale > 0, scale, 1.0)
    y = tl.div_rn(value, tl.broadcast_to(scale[:, None], (ROWS, 128)))
    code = e4m3_encode(tl.abs(y), NATIVE) | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80)
    tl.store(codes + row[:, None].to(tl.int64) * k + column[None, :], code.to(tl.uint8), mask=inside)
    if SHARED:
        lane = tl.arange(0, ROWS)
        tl.store(scales + tl.program_id(0) * groups + group + 0 * lane, scale, mask=lane == 0)
    else:
        tl.store(scales + row.to(tl.int64) * groups + group, scale, mask=row < rows)


@triton.jit
def operand(codes, NATIVE: tl.constexpr):
    """A tile of E4M3 bytes as something `tl.dot` multiplies: the bytes themselves, or FP32 values."""
    if NATIVE >= 89:
        return codes.to(tl.float8e4nv, bitcast=True)
    else:
        bits = codes.to(tl.int32)
        value = e4m3_decode(bits & 0x7F)
        return tl.where(bits >= 0x80, -value, value)


@triton.jit
def fp8_matmul_kernel(
    a, b, a_scales, b_scales, out, m, n, k,
    GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """out [m, n] = sum over 128-wide groups of (A_g B_g^T) * (a_scale * b_scale), groups in order, FP32."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    lane = tl.arange(0, 128)
    total = tl.zeros((BM, BN), tl.float32)
    for group in range(GROUPS):
        inside = group * 128 + lane < k
        at_a = row[:, None].to(tl.int64) * k + group * 128 + lane[None, :]
        at_b = column[None, :].to(tl.int64) * k + group * 128 + lane[:, None]
        x = tl.load(a + at_a, mask=(row[:, None] < m) & inside[None, :], other=0)
        y = tl.load(b + at_b, mask=(column[None, :] < n) & inside[:, None], other=0)
        x_scale = tl.load(a_scales + row.to(tl.int64) * GROUPS + group, mask=row < m, other=0.0)
        y_scale = tl.load(b_scales + (column // 128) * GROUPS + group, mask=column < n, other=0.0)
        product = tl.dot(operand(x, NATIVE), operand(y, NATIVE), input_precision="ieee")
        total += product * (x_scale[:, None] * y_scale[None, :])
    target = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(target, round_to(total, out.dtype.element_ty), mask=(row[:, None] < m) & (column[None, :] < n))
