"""Group amax: one read, one atomic maximum a program."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def group_amax_kernel(x, amax_bits, count, HALF: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    """Atomic maximum, as FP32 bits, of |x| over `count` contiguous elements of group program_id(1).

    `x` is the integer view of the tensor: int32 of FP32, int16 of BF16 or (HALF) of FP16.
    """
    group = tl.program_id(1)
    first = tl.program_id(0).to(tl.int64) * (WIDTH * STEPS)
    best = tl.zeros((WIDTH,), tl.int32)
    for step in tl.static_range(STEPS):
        offset = first + step * WIDTH + tl.arange(0, WIDTH)
        word = tl.load(x + group.to(tl.int64) * count + offset, mask=offset < count, other=0)
        if x.dtype.element_ty == tl.int16:
            word = (word.to(tl.int32) & 0x7FFF) << 16  # a BF16 is the upper half of an FP32
        else:
            word = word & 0x7FFFFFFF
        best = tl.maximum(best, word)
    top = tl.max(best, axis=0)
    if HALF:  # the largest FP16 pattern, widened once
        top = (top >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_bits + group, top)
