"""Residual activation compensation (RAC): select 16-channel blocks by residual norm, quantise their residual.

R = X - Q(X). The selected blocks S of R are quantised again with their own block scales and X's outer scale, and
join the GEMM as extra K columns beside the *same* weight codes: Y = [Q(X), Q(R_S)] [Q(W), Q(W)_S]^T.
Definitions: method.md (QUADS, arXiv 2607.15810, as summarised by third parties).

Order-free scores. A selection must not depend on the order in which a machine adds squares, so a block's score is
an integer: sum over its elements (and over the rows that share the selection) of floor(fl((r * 2^-E)^2) * 2^20),
r in FP32, E the exponent of the outer scale that the rows share (their largest). int64 sums are exact in any order.
Equal scores go to the lower block index.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from quads.emulation.quantizers import BLOCK, NVFP4Tensor, dequantize, quantize

Scope = Literal["token", "tile", "batch", "static", "random", "all"]
_FRACTION_BITS = 20


def residual(x: Tensor, q: NVFP4Tensor) -> Tensor:
    """R = fl(x - Q(x)), float32."""
    return x.float() - dequantize(q)


def block_scores(r: Tensor, outer: Tensor, *, shared: bool = True) -> Tensor:
    """Integer squared norm (int64, [..., K/16]) of each 16-block of `r`, in units set by the outer scale.

    shared: all rows choose together, so the unit is that of the largest `outer`; else each row has its own.

    |r| <= 448 g and 2^E <= g < 2^(E+1), so one square is below 2^20 and 2^20 rows of blocks fit in int64.
    """
    unit = outer.float().amax() if shared else outer.float()
    exponent = torch.frexp(unit).exponent - 1
    # 2^-E from its bits, in float64: pow is not exact on every device, and float32 has no 2^140.
    power = ((1023 - exponent.long()) << 52).view(torch.float64)
    scaled = (r.double() * power).float()
    squares = (scaled * scaled).double() * (1 << _FRACTION_BITS)
    return squares.floor().long().unflatten(-1, (-1, BLOCK)).sum(dim=-1)


def top_blocks(scores: Tensor, count: int) -> Tensor:
    """Indices (int64, [..., count], ascending) of the `count` largest scores; ties go to the lower index."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(dim=-1).values


def gather_blocks(x: Tensor, blocks: Tensor) -> Tensor:
    """Columns of the 16-blocks `blocks` (int64, [S] or [..., S]) of `x` [..., K]: [..., 16 S]."""
    blocked = x.unflatten(-1, (-1, BLOCK))
    index = blocks.expand(*blocked.shape[:-2], blocks.shape[-1]).unsqueeze(-1).expand(*[-1] * x.ndim, BLOCK)
    return blocked.gather(-2, index).flatten(-2)


def quantize_residual(x: Tensor, q: NVFP4Tensor, blocks: Tensor) -> NVFP4Tensor:
    """Q(R_S) for the selected `blocks`: own block scales, the outer scale of `q`; K is 16 * len(blocks)."""
    return quantize(gather_blocks(residual(x, q), blocks), q.outer)
