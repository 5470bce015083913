"""One tile of NVFP4 blocks in registers: block scales and packed codes from values.

A tile of B blocks is held so that one thread owns whole blocks (per-block work is done once) and eight codes meet in
one 32-bit word without a shuffle: for each half of a block (8 elements) the magnitudes of its even and of its odd
elements, FP32 [B, 4] each, and one word of signs. A word holds element j of its half in bits 4j to 4j + 3.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from quads.kernels.bits import (
    INTERPRETED,
    OUTER_HIGH,
    OUTER_LOW,
    SIXTH,
    SIXTH_TAIL,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    quotient,
    rcp_approx,
    reciprocal,
)

NATIVE_WORD = tl.constexpr(
    """{
    .reg .b8 a, b, c, d;
    cvt.rn.satfinite.e2m1x2.f32 a, $2, $1;
    cvt.rn.satfinite.e2m1x2.f32 b, $4, $3;
    cvt.rn.satfinite.e2m1x2.f32 c, $6, $5;
    cvt.rn.satfinite.e2m1x2.f32 d, $8, $7;
    mov.b32 $0, {a, b, c, d};
    }"""
)


def _bits(value: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def _portable_word() -> str:
    """PTX of eight codes by three ramps each (kernels/bits.py), packed in the same fused multiply-adds.

    Element j of a half word has weight w = 16^j. Its ramps are added to 2^23 w, whose ulp is w, plus the codes above
    it (multiples of 16 w, so even): each sum rounds to a multiple of w. Subtracting 2^23 w - 2^19 w is exact and leaves
    the base of element j - 1. At the end the low 16 bits of the FP32 number are the four codes.
    """
    lines = ["{", ".reg .f32 p, q, r, near, far;"]
    for name, first in (("near", 1), ("far", 5)):
        for j in (3, 2, 1, 0):
            weight, y = 16.0**j, f"${first + j}"
            base = _bits(2.0**23 * weight) if j == 3 else name
            lines += [
                f"mul.rn.sat.f32 p, {y}, {_bits(0.5)};",
                f"fma.rn.sat.f32 q, {y}, {_bits(0.5)}, {_bits(-1.0)};",
                f"fma.rn.sat.f32 r, {y}, {_bits(0.5)}, {_bits(-2.0)};",
                f"fma.rn.f32 {name}, p, {_bits(4 * weight)}, {base};",
                f"fma.rn.f32 {name}, q, {_bits(2 * weight)}, {name};",
                f"fma.rn.f32 {name}, r, {_bits(weight)}, {name};",
            ]
            if j:
                lines.append(f"add.rn.f32 {name}, {name}, {_bits(-(2.0**23) * weight * 15 / 16)};")
    return "\n".join(
        [*lines, ".reg .b32 a, b;", "mov.b32 a, near;", "mov.b32 b, far;", "prmt.b32 $0, a, b, 0x5410;", "}"]
    )


PORTABLE_WORD = tl.constexpr(_portable_word())


@triton.jit
def split_words(words):
    """The four columns of [B, 4], [B] each."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def sign_word_of_pairs(pairs):
    """Sign bits of four pairs of 16-bit floats, int32 [B, 4], at bits 4j + 3 of one word [B]."""
    if INTERPRETED:
        bits = ((pairs >> 12) & 0x08) | ((pairs >> 24) & 0x80)
        return tl.sum(bits << (8 * tl.arange(0, 4)[None, :]), axis=1)
    else:
        first, second, third, fourth = split_words(pairs)
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, even, odd;
            prmt.b32 a, $1, $2, 0x7531;
            prmt.b32 b, $3, $4, 0x7531;
            prmt.b32 even, a, b, 0x6420;
            prmt.b32 odd, a, b, 0x7531;
            shr.u32 even, even, 4;
            and.b32 even, even, 0x08080808;
            and.b32 odd, odd, 0x80808080;
            or.b32 $0, even, odd;
            }""",
            "=r,r,r,r,r", [first, second, third, fourth], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def sign_word_of_singles(even, odd):
    """The same for eight FP32 values, as int32 [B, 4] twice."""
    bits = ((even >> 28) & 0x08) | ((odd >> 24) & 0x80)
    return tl.sum(bits << (8 * tl.arange(0, 4)[None, :]), axis=1)


@triton.jit
def columns(near, far):
    """[B, 2] and [B, 2] side by side: [B, 4]."""
    return tl.reshape(tl.permute(tl.join(near, far), (0, 2, 1)), (near.shape[0], 4))


@triton.jit
def load_raw(words, ELEMENT: tl.constexpr, inside):
    """Eight elements at `words` (int32 pointers [B]) as two int32 [B, 4]: FP32 bits of the even and of the odd ones,
    or four pairs of a 16-bit type (twice the same). Zeros outside."""
    if tl.float32 == ELEMENT:
        # As 64-bit pairs, 16 bytes a load: one load of [B, 8] would share a block between two threads.
        start = words.to(tl.pointer_type(tl.int64))[:, None] + tl.arange(0, 2)[None, :]
        near = tl.load(start, mask=inside[:, None], other=0)
        far = tl.load(start + 2, mask=inside[:, None], other=0)
        return columns(near.to(tl.int32), far.to(tl.int32)), columns(
            (near >> 32).to(tl.int32), (far >> 32).to(tl.int32)
        )
    else:
        pairs = tl.load(words[:, None] + tl.arange(0, 4)[None, :], mask=inside[:, None], other=0)
        return pairs, pairs


@triton.jit
def raw_signs(first, second, ELEMENT: tl.constexpr):
    """Sign word [B] of a raw half."""
    if tl.float32 == ELEMENT:
        return sign_word_of_singles(first, second)
    else:
        return sign_word_of_pairs(first)


@triton.jit
def raw_values(first, second, ELEMENT: tl.constexpr):
    """Even and odd values of a raw half, FP32 [B, 4] each, signed."""
    if tl.float32 == ELEMENT:
        even = first
        odd = second
    elif tl.bfloat16 == ELEMENT:
        even = first << 16
        odd = first & (-65536)
    else:
        even = first.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
        odd = (first >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    return even.to(tl.float32, bitcast=True), odd.to(tl.float32, bitcast=True)


@triton.jit
def raw_magnitudes(first, second, ELEMENT: tl.constexpr):
    """The same without signs."""
    even, odd = raw_values(first, second, ELEMENT)
    return tl.abs(even), tl.abs(odd)


@triton.jit
def half_amax(even, odd):
    return tl.max(tl.maximum(even, odd), axis=1)


@triton.jit
def code_word(even, odd, NATIVE: tl.constexpr):
    """E2M1 magnitude codes of eight quotients (FP32 [B, 4] twice, >= 0) as one word [B]."""
    if INTERPRETED:
        low = e2m1_encode(even)
        high = e2m1_encode(odd)
        return tl.sum((low | (high << 4)) << (8 * tl.arange(0, 4)[None, :]), axis=1)
    else:
        e0, e1, e2, e3 = split_words(even)
        o0, o1, o2, o3 = split_words(odd)
        return tl.inline_asm_elementwise(
            NATIVE_WORD if NATIVE >= 100 else PORTABLE_WORD,
            "=r,f,f,f,f,f,f,f,f", [e0, o0, e1, o1, e2, o2, e3, o3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def fast_range(outer):
    """1 where the outer scale allows the two-instruction quotient, else 0 (int32, the shape of `outer`)."""
    return ((outer >= OUTER_LOW) & (outer <= OUTER_HIGH)).to(tl.int32)


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
def step_reciprocal(step, FAST: tl.constexpr):
    """What `divide` needs of the steps [B]: their reciprocals (0 for a step of 0), or nothing."""
    if FAST:
        live = step > 0
        head, tail = reciprocal(tl.where(live, step, 1.0))
        return tl.where(live, head, 0.0), tl.where(live, tail, 0.0)
    else:
        return step, step


@triton.jit
def divide(magnitude, step, head, tail, FAST: tl.constexpr):
    """magnitude / step for [B, 4] values and [B] steps, 0 where step is 0."""
    if FAST:
        return quotient(magnitude, head[:, None], tail[:, None])
    else:
        safe = tl.where(step > 0, step, 1.0)
        return tl.where(step[:, None] > 0, tl.div_rn(magnitude, safe[:, None]), 0.0)


@triton.jit
def encode_half(even, odd, signs, step, head, tail, FAST: tl.constexpr, NATIVE: tl.constexpr):
    """Signed codes of eight elements: one word [B]."""
    even = divide(even, step, head, tail, FAST)
    odd = divide(odd, step, head, tail, FAST)
    return code_word(even, odd, NATIVE) | signs


@triton.jit
def encode_half_vllm(even, odd, signs, factor, NATIVE: tl.constexpr):
    return code_word(even * factor[:, None], odd * factor[:, None], NATIVE) | signs


@triton.jit
def block_scale_vllm(amax, encode, NATIVE: tl.constexpr):
    """(scale code, factor) in vLLM's dialect; `encode` [B] is its global scale, 2688 / amax."""
    sixth = amax * rcp_approx(tl.full(amax.shape, 6.0, tl.float32))
    scale = e4m3_encode(encode * sixth, NATIVE)
    live = scale > 0
    inverse = rcp_approx(tl.where(live, e4m3_decode(scale) * rcp_approx(encode), 1.0))
    return scale, tl.where(live, inverse, 0.0)
