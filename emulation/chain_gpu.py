"""The NVFP4 chain of `mma.chain` as one Triton kernel, for operands on a GPU; C starts at zero.

Not a fast path with cases, as on a CPU: every step truncates every term, so all data run at one speed. float64 as in
fdpa.py; the conversion of a float64 to int64 truncates toward zero. Group sums are FP16 dot products of FP4 values,
exact in the FP32 accumulator (at most 12 significant bits) on every tensor core. Compared with `mma.chain` bit for bit
by tests/emulation/test_chain_gpu.py (interpreter and GPU). Imported by `gemm` for GPU tensors only: this is the one
module of the emulator that needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.emulation import fdpa, mma

_SMALL = 1 << 17  # outputs up to which smaller tiles keep more of a GPU busy


def chain(a: mma.Operand, b: mma.Operand, model: mma.Model) -> Tensor:
    """FP32 accumulator [M, N]: codes uint8 [M, K] and [N, K], UE4M3 scales [., K/16], K a multiple of 64."""
    assert a.scales is not None and b.scales is not None and model.scale == "ue4m3" and model.group == 16
    (m, k), n = a.codes.shape, b.codes.shape[0]
    out = torch.empty(m, n, dtype=torch.float32, device=a.codes.device)
    tile = 16 if m * n <= _SMALL else 32
    grid = (triton.cdiv(m, tile), triton.cdiv(n, tile))
    chain_kernel[grid](
        *(x.contiguous() for x in (a.codes, b.codes, a.scales, b.scales)),
        out,
        m,
        n,
        STEPS=k // 64,
        F=model.fraction_bits,
        ZERO=model.zero_exponent,
        DEAD_IN_TOP=model.dead_group == "included",
        CANCELLED_IN_TOP=model.cancelled_group == "included",
        NAN=fdpa.OUTPUTS[model.output].nan,
        TILE=tile,
    )
    return out


@triton.jit
def chain_kernel(
    a, b, scale_a, scale_b, out, m, n,
    STEPS: tl.constexpr, F: tl.constexpr, ZERO: tl.constexpr, DEAD_IN_TOP: tl.constexpr, CANCELLED_IN_TOP: tl.constexpr,
    NAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One TILE x TILE tile of outputs."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    acc = tl.zeros((TILE, TILE), tl.float64)
    nan = tl.zeros((TILE, TILE), tl.int32)
    k: tl.constexpr = STEPS * 64
    for step in range(STEPS):
        g = step * 4
        v0, e0, n0 = _term(a, b, scale_a, scale_b, rows, columns, m, n, k, g, ZERO, DEAD_IN_TOP, CANCELLED_IN_TOP)
        v1, e1, n1 = _term(a, b, scale_a, scale_b, rows, columns, m, n, k, g + 1, ZERO, DEAD_IN_TOP, CANCELLED_IN_TOP)
        v2, e2, n2 = _term(a, b, scale_a, scale_b, rows, columns, m, n, k, g + 2, ZERO, DEAD_IN_TOP, CANCELLED_IN_TOP)
        v3, e3, n3 = _term(a, b, scale_a, scale_b, rows, columns, m, n, k, g + 3, ZERO, DEAD_IN_TOP, CANCELLED_IN_TOP)
        ec = tl.where(acc == 0.0, ZERO, ((acc.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32) - 1023)
        top = tl.maximum(tl.maximum(tl.maximum(e0, e1), tl.maximum(e2, e3)), ec)
        unit = _power_of_two(F - top)
        total = (v0 * unit).to(tl.int64) + (v1 * unit).to(tl.int64) + (v2 * unit).to(tl.int64)
        total += (v3 * unit).to(tl.int64) + (acc * unit).to(tl.int64)
        exact = total.to(tl.float64) * _power_of_two(top - F)
        acc = (exact.to(tl.int64, bitcast=True) & -536870912).to(tl.float64, bitcast=True)  # RZ to 24 bits
        nan |= n0 | n1 | n2 | n3
    bits = tl.where(nan > 0, NAN, acc.to(tl.float32).to(tl.int32, bitcast=True))
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    at = out + rows[:, None].to(tl.int64) * n + columns[None, :]
    tl.store(at, bits.to(tl.float32, bitcast=True), mask=inside)


@triton.jit
def _term(
    a, b, scale_a, scale_b, rows, columns, m, n, k, group,
    ZERO: tl.constexpr, DEAD_IN_TOP: tl.constexpr, CANCELLED_IN_TOP: tl.constexpr,
):  # fmt: skip
    """Value (float64), exponent (int32) and NaN flag (int32) of one group of 16, exact."""
    x, y = _codes(a, rows, m, k, group), _codes(b, columns, n, k, group)
    sums = tl.dot(x, tl.trans(y))
    live = tl.dot((x != 0).to(tl.float16), tl.trans((y != 0).to(tl.float16))) > 0
    sa, ea, na = _scale(scale_a, rows, m, k, group)
    sb, eb, nb = _scale(scale_b, columns, n, k, group)
    scale = sa[:, None] * sb[None, :]
    exponent = ea[:, None] + eb[None, :]
    value = (sums * scale).to(tl.float64) * _power_of_two(exponent)
    if not DEAD_IN_TOP:
        exponent = tl.where(live & (scale != 0), exponent, ZERO)
    if not CANCELLED_IN_TOP:
        exponent = tl.where(live & (sums == 0), ZERO, exponent)
    return value, exponent, na[:, None] | nb[None, :]


@triton.jit
def _codes(codes, rows, count, k, group):
    """FP4 values [TILE, 16] as FP16: the code's bits put into the FP16 exponent, then scaled by the biases' ratio."""
    at = codes + rows[:, None].to(tl.int64) * k + (group * 16 + tl.arange(0, 16))[None, :]
    code = tl.load(at, mask=rows[:, None] < count, other=0).to(tl.int16)
    return (((code & 8) << 12) | ((code & 7) << 9)).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def _scale(scales, rows, count, k, group):
    """Significand (float32), exponent and NaN flag (int32) of UE4M3 scales [TILE]."""
    byte = tl.load(scales + rows.to(tl.int64) * (k // 16) + group, mask=rows < count, other=0).to(tl.int32) & 0x7F
    normal = (byte >= 8).to(tl.int32)
    return ((byte & 7) + 8 * normal).to(tl.float32) * 0.125, tl.maximum(byte >> 3, 1) - 7, (byte == 0x7F).to(tl.int32)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
