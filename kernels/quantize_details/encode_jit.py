"""One tile of NVFP4 blocks in registers: block scales and packed codes from values.

A tile is two FP32 tensors [B, 8], the lower and the upper half of B blocks, so that one thread holds a whole block
(two 16-byte loads of a 16-bit type) and the per-block work is done once. A word packs eight codes, element j in bits
4j to 4j + 3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quads.kernels.bits import (
    OUTER_HIGH,
    OUTER_LOW,
    SIXTH,
    SIXTH_TAIL,
    e2m1_magic,
    e4m3_decode,
    e4m3_encode,
    quotient,
    reciprocal,
)

# Each code carries 0x4B000000, the exponent of 2^23. Of the eight shifted copies in a word all bits above 31 are
# lost: 0x4B000000 + 0xB0000000 is left, as a signed integer
MAGIC_BITS_IN_WORD = tl.constexpr(-0x05000000)


@triton.jit
def block_amax(low, high):
    """max |x| of each block: [B]."""
    return tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))


@triton.jit
def fast_range(outer):
    """Whether every outer scale of the program allows the two-instruction quotient. `outer` is [B] or a scalar."""
    bad = ((outer < OUTER_LOW) | (outer > OUTER_HIGH)).to(tl.int32)
    return tl.max(bad, axis=0) == 0


@triton.jit
def block_scale(amax, outer, FAST: tl.constexpr, NATIVE: tl.constexpr):
    """E4M3 code of the block scale, fl(fl(amax / 6) / outer): int32 [B]."""
    if FAST:
        sixth = quotient(amax, tl.full(amax.shape, SIXTH, tl.float32), SIXTH_TAIL)
        head, tail = reciprocal(outer)
        ratio = quotient(sixth, head, tail)
    else:
        ratio = tl.div_rn(tl.div_rn(amax, 6.0), outer)
    return e4m3_encode(ratio, NATIVE)


@triton.jit
def divide(x, step, head, tail, FAST: tl.constexpr):
    """|x| / step for [B, 8] values and [B] steps, 0 where step is 0."""
    magnitude = tl.abs(x)
    if FAST:
        return quotient(magnitude, head[:, None], tail[:, None])
    else:
        safe = tl.where(step > 0, step, 1.0)
        return tl.where(step[:, None] > 0, tl.div_rn(magnitude, safe[:, None]), 0.0)


@triton.jit
def pack_word(x, y, NATIVE: tl.constexpr):
    """Codes of y with the signs of x, [B, 8], as one int32 word a row: [B]."""
    lane = tl.arange(0, 8)[None, :]
    codes = e2m1_magic(y).to(tl.int32, bitcast=True)
    sign = (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)
    word = tl.sum((codes + sign * 8) << (4 * lane), axis=1)
    return word - MAGIC_BITS_IN_WORD


@triton.jit
def encode_tile(low, high, outer, FAST: tl.constexpr, NATIVE: tl.constexpr):
    """(scale codes int32 [B], words int32 [B, 2]) of one tile; `outer` is [B]."""
    scale = block_scale(block_amax(low, high), outer, FAST, NATIVE)
    step = e4m3_decode(scale) * outer
    head = step
    tail = step
    if FAST:
        live = scale > 0
        head, tail = reciprocal(tl.where(live, step, 1.0))
        head = tl.where(live, head, 0.0)
        tail = tl.where(live, tail, 0.0)
    first = pack_word(low, divide(low, step, head, tail, FAST), NATIVE)
    second = pack_word(high, divide(high, step, head, tail, FAST), NATIVE)
    return scale, tl.join(first, second)
