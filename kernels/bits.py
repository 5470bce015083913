"""Device functions shared by the kernels: E2M1 and E4M3 encode and decode, and the correctly rounded quotient.

Everything is FP32 and integer arithmetic that Triton's interpreter and every chip agree on; `NATIVE` (a constexpr int)
allows hardware conversions on top, with the same bits: 0 none, 89 cvt to E4M3, 100 cvt to E2M1 as well.
Kernels that call these must be launched with enable_fp_fusion=False.

Quotient. x / d costs two instructions for a divisor that is shared: with r = RN(1/d) and its tail t = fl(e * r),
e = fl(1 - d * r) from one fused multiply-add, y = fma(x, r, fl(x * t)) differs from x / d by less than 2^-46
relative before its one rounding. So y and fl(x/d) fall on the same side of every rounding boundary b of E2M1 and of
E4M3, unless x/d lies that close to an edge of the interval that fl() rounds to b. Of all pairs of FP32 significands
766 lie within 2^-42 of one, and only one comes out wrong: d all ones, x a power of two, where t takes one ulp less
(tests/kernels/test_quotient.py finds and checks them all). Needs 2^-41 <= d <= 2^69; other divisors take div_rn.

E2M1. The code is a rounded sum of three ramps, 4 sat(y/2) + 2 sat(y/2 - 1) + sat(y/2 - 2), sat clamping to [0, 1]:
slopes 2, 1 and 1/2 in the binades [0, 2], [2, 4] and [4, 6], and 7 beyond. Adding 2^23 rounds to an integer, to even
at a tie; each ramp starts at an even code and is exact, so one rounding decides. No comparison, no integer operation.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
SIXTH = tl.constexpr(0.16666667163372040)  # RN(1/6) and its tail: 1/6 - RN(1/6)
SIXTH_TAIL = tl.constexpr(-4.967053879312289e-09)
OUTER_LOW = tl.constexpr(2.0**-32)  # outer scales for which the two-instruction quotient holds for every x
OUTER_HIGH = tl.constexpr(2.0**60)
MAGIC = tl.constexpr(8388608.0)  # 2^23: adding it rounds to an integer
MAGIC_BITS = tl.constexpr(0x4B000000)


@triton.jit
def fused_multiply_add(x, y, z):
    """fma(x, y, z) in FP32 with one rounding, also in the interpreter (which would round the product)."""
    if INTERPRETED:
        product = x.to(tl.float64) * y.to(tl.float64)  # exact: 48 bits
        total = product + z
        rest = total - product
        error = (product - (total - rest)) + (z - rest)  # Knuth's TwoSum: total + error is exact
        bits = total.to(tl.int64, bitcast=True)
        # Round to odd, so that the second rounding to FP32 is the only one (Boldo and Melquiond, 2008).
        away = tl.where((error > 0) == (total > 0), 1, -1)
        inexact = (error != 0) & (tl.abs(total) < float("inf")) & ((bits & 1) == 0)
        return (bits + tl.where(inexact, away, 0)).to(tl.float64, bitcast=True).to(tl.float32)
    else:
        return tl.fma(x, y, z)


@triton.jit
def rcp_rn(d):
    """RN(1/d) in FP32."""
    if INTERPRETED:
        return tl.div_rn(tl.full(d.shape, 1.0, tl.float32), d)
    else:
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(d):
    """(RN(1/d), tail): their sum is 1/d to 2^-47. d is FP32, positive, in the range of the module docstring."""
    head = rcp_rn(d)
    tail = fused_multiply_add(-d, head, tl.full(d.shape, 1.0, tl.float32)) * head
    # One ulp nearer to 0 where the significand of d is all ones: there the second order of the tail decides.
    ones = (d.to(tl.int32, bitcast=True) & 0x7FFFFF) == 0x7FFFFF
    return head, (tail.to(tl.int32, bitcast=True) - ones.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def quotient(x, head, tail):
    """x / d for a `reciprocal` of d: on the same side as fl(x/d) of every E2M1 and E4M3 rounding boundary."""
    return fused_multiply_add(x, head, x * tail)


@triton.jit
def rcp_approx(d):
    """rcp.approx.ftz.f32, within one ulp of 1/d; the interpreter takes the correctly rounded reciprocal instead."""
    if INTERPRETED:
        return tl.div_rn(tl.full(d.shape, 1.0, tl.float32), d)
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def e4m3_encode(t, NATIVE: tl.constexpr):
    """E4M3 code (int32, 0 to 0x7E) of t >= 0: round to nearest even, saturating."""
    if NATIVE >= 89:
        # One conversion an element, not Triton's cast: of its pairs ptxas 12.8 loses one (NOTES-quantize.md).
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 pair;
            cvt.rn.satfinite.e4m3x2.f32 pair, 0f00000000, $1;
            cvt.u32.u16 $0, pair;
            }""",
            "=r,f", [t], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        bits = t.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        subnormal = (t * 512.0 + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
        return tl.minimum(tl.where(t < 0.015625, subnormal, normal), 0x7E)


@triton.jit
def e4m3_decode(code):
    """FP32 value of an E4M3 code (int32, 0 to 0x7E). Exact."""
    return (code << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def e2m1_magic(y):
    """2^23 + E2M1 magnitude code of y >= 0, as FP32: round to nearest even, saturating."""
    if INTERPRETED:
        low = tl.minimum(y * 0.5, 1.0)
        middle = tl.minimum(tl.maximum(y * 0.5 - 1.0, 0.0), 1.0)
        high = tl.minimum(tl.maximum(y * 0.5 - 2.0, 0.0), 1.0)
        return ((low * 4.0 + MAGIC) + middle * 2.0) + high
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 low, middle, high;
            mul.rn.sat.f32 low, $1, 0f3F000000;
            fma.rn.sat.f32 middle, $1, 0f3F000000, 0fBF800000;
            fma.rn.sat.f32 high, $1, 0f3F000000, 0fC0000000;
            fma.rn.f32 low, low, 0f40800000, 0f4B000000;
            fma.rn.f32 low, middle, 0f40000000, low;
            add.rn.f32 $0, low, high;
            }""",
            "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def e2m1_encode(y):
    """E2M1 magnitude code (int32, 0 to 7) of y >= 0."""
    return e2m1_magic(y).to(tl.int32, bitcast=True) - MAGIC_BITS


@triton.jit
def e2m1_decode(code):
    """FP32 magnitude of an E2M1 code (int32; the sign bit is ignored). Exact."""
    return ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def round_to(x, TYPE: tl.constexpr):
    """FP32 to TYPE, round to nearest even (the interpreter truncates to bfloat16). Finite values."""
    if INTERPRETED and tl.bfloat16 == TYPE:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(TYPE)
