"""Residual of a tile: decode the codes just made, subtract, score, and quantise again (see encode_jit for tiles)."""

from __future__ import annotations

import triton
import triton.language as tl

from quads.kernels.bits import e4m3_decode
from quads.kernels.quantize_details.encode_jit import (
    block_scale,
    encode_half,
    half_amax,
    raw_values,
    sign_word_of_singles,
    step_reciprocal,
)


@triton.jit
def dequantize_word(word, scale, outer, FAST: tl.constexpr):
    """|Q| of the even and of the odd elements of a word [B]: fl(fl(q * s) * g), FP32 [B, 4] each.

    A code shifted to bit 22 is an FP32 number, q * 2^-126; s and g take the 126 doublings between them.
    """
    lane = 8 * tl.arange(0, 4)[None, :]
    even = (((word[:, None] >> lane) & 7) << 22).to(tl.float32, bitcast=True)
    odd = (((word[:, None] >> (lane + 4)) & 7) << 22).to(tl.float32, bitcast=True)
    if FAST:
        unit = (scale * 1.2676506002282294e30)[:, None]  # 2^100
        lift = (outer * 67108864.0)[:, None]  # 2^26
        return even * unit * lift, odd * unit * lift
    else:
        unit = scale[:, None]
        lift = outer[:, None]
        return even * 8.507059173023462e37 * unit * lift, odd * 8.507059173023462e37 * unit * lift


@triton.jit
def subtract(x, q):
    """fl(x - q') for |Q| = q, q' with the sign of x."""
    sign = x.to(tl.int32, bitcast=True) & (-2147483648)
    return x - (q.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def residual_half(first, second, word, scale, outer, ELEMENT: tl.constexpr, FAST: tl.constexpr):
    """R = fl(x - Q(x)) of a raw half whose codes are `word`: even and odd, FP32 [B, 4] each."""
    even, odd = raw_values(first, second, ELEMENT)
    q_even, q_odd = dequantize_word(word, scale, outer, FAST)
    return subtract(even, q_even), subtract(odd, q_odd)


@triton.jit
def squares(r, unit, FAST: tl.constexpr):
    """Sum over [B, 4] of floor(fl((r / 2^E)^2) * 2^20), int64 [B]; `unit` is 2^(10-E), or 2^-E if not FAST."""
    scaled = r * unit[:, None]
    square = scaled * scaled
    if not FAST:
        square = square * 1048576.0
    return tl.sum(square.to(tl.int64), axis=1)


@triton.jit
def encode_residual(le, lo, he, ho, outer, FAST: tl.constexpr, NATIVE: tl.constexpr):
    """(scale codes, lower words, upper words) of the residual values of a tile."""
    amax = tl.maximum(half_amax(tl.abs(le), tl.abs(lo)), half_amax(tl.abs(he), tl.abs(ho)))
    scale = block_scale(amax, outer, FAST, NATIVE)
    step = e4m3_decode(scale) * outer
    head, tail = step_reciprocal(step, FAST)
    ls = sign_word_of_singles(le.to(tl.int32, bitcast=True), lo.to(tl.int32, bitcast=True))
    hs = sign_word_of_singles(he.to(tl.int32, bitcast=True), ho.to(tl.int32, bitcast=True))
    first = encode_half(tl.abs(le), tl.abs(lo), ls, step, head, tail, FAST, NATIVE)
    second = encode_half(tl.abs(he), tl.abs(ho), hs, step, head, tail, FAST, NATIVE)
    return scale, first, second
