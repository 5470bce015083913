"""Bytes and floating-point operations of one call: each input read once, each output written once, from main memory.

A weight that RAC repeats is read once. FLOPs are those executed, RAC's columns included. The same counts serve the
measured shares and the models of other chips.
"""

from __future__ import annotations

BLOCK = 16
NVFP4 = 0.5 + 1 / BLOCK  # bytes of an element: code and its share of a block scale
BYTES = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "fp8_block": 1 + 4 / 128, "nvfp4": NVFP4, "w4a16": NVFP4}


def quantize(elements: int, source: str = "bf16") -> float:
    """Bytes of quantising to NVFP4."""
    return elements * (BYTES[source] + NVFP4)


def quantize_rac(elements: int, ratio: float, *, second_pass: bool, source: str = "bf16") -> float:
    """Bytes of quantising, with the residual of `ratio` of the blocks; a second pass reads those and their codes."""
    again = ratio * (BYTES[source] + NVFP4) if second_pass else 0.0
    return elements * (BYTES[source] + (1 + ratio) * NVFP4 + again)


def gemm(m: int, n: int, k: int, activations: str, weights: str, *, extra: int = 0) -> tuple[float, float]:
    """(bytes, FLOPs) of y [M, N] in bfloat16; extra: RAC's columns, repeated weight columns read once."""
    moved = m * (k + extra) * BYTES[activations] + n * k * BYTES[weights] + 2.0 * m * n
    return moved, 2.0 * m * n * (k + extra)


def moe(
    tokens: int, top_k: int, used: float, hidden: int, inner: int, weights: str, *, ratio: float = 0.0
) -> tuple[float, float]:
    """(bytes, FLOPs) of a SwiGLU layer whose routing uses `used` experts; what is between the products stays in cache.

    ratio: RAC's share of the columns of both products.
    """
    moved = used * 3.0 * inner * hidden * BYTES[weights] + tokens * hidden * (2.0 + 2.0)
    return moved, 6.0 * tokens * top_k * inner * hidden * (1 + ratio)
