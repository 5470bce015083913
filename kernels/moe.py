"""A routed SwiGLU layer in W4A4: quantise, w13, SwiGLU, requantise, w2, weighted sum.

    gate, up = bf16(x W_gate^T), bf16(x W_up^T);  h = bf16(silu(gate) * up), silu(v) = v / (1 + exp(-v)) in FP32
    y = bf16(h W2^T);  out = cast(sum over the token's experts, in the order of topk_ids, of fl(weight * y))
x is quantised once per token (per-token outer scale), h once per token and expert. Gate and up may have different outer
scales. A routed expert with no token, a token with no expert (ids < 0), and M = 0 are all allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from quads.emulation.quantizers import BLOCK
from quads.kernels.gemm_details import grouped as grouped_rows
from quads.kernels.gemm_details import hopper, native, prefill
from quads.kernels.gemm_details.grouping import Grouping
from quads.kernels.moe_details import routing
from quads.kernels.moe_details.swiglu import swiglu
from quads.kernels.prepack import HopperWeight, PreparedWeight, Quantized

_MANY_TILES = 8 * 132  # thread blocks enough to fill an H200 several times
_LONG_K = 1024
_WIDTHS = (8, 16, 24, 32)  # rows of a block, for products that decode weights themselves

Way = Literal["native", "prefill", "grouped", "decode"]
# Quantises rows [M, K] and says which K blocks the columns past K repeat: int32 [S], [experts, S], or None.
Quantizer = Callable[[Tensor], tuple[Quantized, Tensor | None]]


def quantize_rows(x: Tensor) -> tuple[Quantized, None]:
    """Plain W4A4: one outer scale per row, no residual."""
    from quads.kernels.quantize import quantize

    return quantize(x, granularity="token"), None


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: PreparedWeight,
    w2: PreparedWeight,
    *,
    quantize_x: Quantizer = quantize_rows,
    quantize_h: Quantizer = quantize_rows,
    out_dtype: torch.dtype = torch.bfloat16,
    plan_for: int | None = None,
) -> Tensor:
    """The layer's output [M, hidden].

    x bfloat16 [M, hidden]; topk_ids int [M, top_k], topk_weights float32 [M, top_k]; w13 =
    `prepare_weight(..., interleave=True)` of [experts, 2 I, hidden] (gate rows first), w2 = `prepare_weight` of
    [experts, hidden, I]. RAC: give quantisers that append residual columns; a block list per expert ([experts, S])
    is for `quantize_h`, whose rows belong to one expert each. plan_for: shape the products as for so many routed rows,
    whatever M is; the order of sums, and so a row's bits, then do not depend on the rows beside it.
    Raises ValueError on shapes that do not fit.
    """
    _check(x, topk_ids, topk_weights, w13, w2)
    if x.shape[0] == 0:
        return torch.empty((0, w2.n), dtype=out_dtype, device=x.device)
    ids, weights = topk_ids.to(torch.int32).contiguous(), topk_weights.float().contiguous()
    pairs = plan_for or ids.numel()
    grouping = routing.route(ids, w2.experts, slot_width(pairs, w2))
    a, blocks = quantize_x(x)
    h = grouped(a, w13, grouping, blocks, swiglu_rows=True, pairs=pairs)
    a, blocks = quantize_h(h)
    y = grouped(a, w2, replace(grouping, share=1), blocks, swiglu_rows=False, pairs=pairs)
    return routing.combine(y, weights, ids, w2.experts, out_dtype)


def slot_width(pairs: int, weight: PreparedWeight) -> int:
    """Rows of one block: 1.4 times the mean rows of an expert or more, so that most experts need one block."""
    if not isinstance(weight, HopperWeight):
        return native.tile_for(native.family(), 1).tokens
    if prefill.takes(pairs, weight):
        return prefill.ROWS
    return next((w for w in _WIDTHS[:-1] if pairs <= most_pairs(w, weight)), _WIDTHS[-1])


def most_pairs(width: int, weight: PreparedWeight) -> int:
    """The most routed rows that blocks of `width` rows are taken for."""
    return int(0.7 * width * weight.experts)


def choose(pairs: int, weight: PreparedWeight) -> Way:
    """The way that `moe` multiplies `pairs` routed rows by a weight."""
    if not isinstance(weight, HopperWeight):
        return "native"
    if prefill.takes(pairs, weight):
        return "prefill"
    blocks = routing.most_blocks(pairs, weight.experts, slot_width(pairs, weight))
    return "grouped" if fills_the_chip(blocks, weight) else "decode"


def fills_the_chip(blocks: int, weight: HopperWeight) -> bool:
    """Whether so many blocks of rows give the chip thread blocks enough for `rows_plan`."""
    return blocks * weight.codes.shape[1] >= _MANY_TILES


def grouped(
    a: Quantized,
    weight: PreparedWeight,
    grouping: Grouping,
    blocks: Tensor | None,
    *,
    swiglu_rows: bool,
    pairs: int | None = None,
) -> Tensor:
    """One grouped product: each routed row of `a` times its expert's weight, [rows_out, N] (or N/2 after SwiGLU).

    pairs: routed rows to plan for, where it is not as many as there are.
    """
    width = grouping.slots.numel() // grouping.groups.numel()
    if not isinstance(weight, HopperWeight):
        tile = replace(native.tile_for(native.family(), 1), tokens=width)
        y = native.product(a, weight, tile, blocks=blocks, grouping=grouping)
        return swiglu(y) if swiglu_rows else y
    if width == prefill.ROWS:
        return prefill.grouped(a, weight, grouping, blocks, swiglu=swiglu_rows)
    most = grouping.groups.numel() if pairs is None else routing.most_blocks(pairs, weight.experts, width)
    if fills_the_chip(most, weight):
        plan = rows_plan(width, weight.k)
        return grouped_rows.grouped(a, weight, plan, grouping, blocks=blocks, swiglu=swiglu_rows)
    split = split_plan(width, weight)
    return hopper.decode(a, weight, split, blocks=blocks, grouping=grouping, swiglu=swiglu_rows)


def rows_plan(width: int, k: int) -> grouped_rows.GroupedPlan:
    """Thread-block shape where there are enough blocks of rows to fill the chip several times (NOTES-gemm.md).

    Along a long K eight warps share the activations, along a short one four: their start costs less.
    """
    row_warps = 8 if width <= 16 and k >= _LONG_K else 4
    resident = {8: 4, 16: 4, 24: 3, 32: 3}[width] * 4 // row_warps
    return grouped_rows.GroupedPlan(tokens=width, row_warps=row_warps, min_blocks=resident)


def split_plan(width: int, weight: HopperWeight) -> hopper.Plan:
    """Thread-block shape for few blocks of rows: four warps share K, so that the work covers the chip."""
    chunks = -(-weight.k // 64)
    k_warps, resident = min(4, 1 << (chunks - 1).bit_length()), {8: 2}.get(width, 1)
    return hopper.Plan(tokens=width, k_warps=k_warps, row_warps=2, stages=3, run=1, min_blocks=resident)


def compile_ahead(w13: PreparedWeight, w2: PreparedWeight, *, residual: bool) -> None:
    """Compile the CUDA C++ products that `moe` may launch for any number of tokens, so that none waits for a compiler.

    residual: with RAC. Where kernels are Triton's this does nothing: they compile at their first launch.
    """
    for weight, swiglu_rows in ((w13, True), (w2, False)):
        if isinstance(weight, HopperWeight):
            for pairs in _ends_of_widths(weight):
                _load(pairs, weight, residual, swiglu_rows)


def _ends_of_widths(weight: HopperWeight) -> list[int]:
    """The fewest and the most routed rows of each width: between them nothing changes but, once, the kernel."""
    edges = [most_pairs(width, weight) for width in _WIDTHS[:-1]]
    return [1, *edges, *(edge + 1 for edge in edges), prefill.CROSSOVER * weight.experts - 1]


def _load(pairs: int, weight: HopperWeight, residual: bool, swiglu_rows: bool) -> None:
    width, k_blocks = slot_width(pairs, weight), weight.k // BLOCK
    if choose(pairs, weight) == "grouped":
        grouped_rows.grouped_kernel(rows_plan(width, weight.k), residual, swiglu_rows, False, k_blocks)
    else:
        hopper.decode_kernel(split_plan(width, weight), residual, True, swiglu_rows, False, k_blocks)


def _check(x: Tensor, ids: Tensor, weights: Tensor, w13: PreparedWeight, w2: PreparedWeight) -> None:
    if x.ndim != 2 or x.shape[1] != w13.k:
        raise ValueError(f"x: shape {tuple(x.shape)} does not fit w13's K = {w13.k}")
    if ids.shape != weights.shape or ids.ndim != 2 or ids.shape[0] != x.shape[0]:
        raise ValueError(f"topk_ids {tuple(ids.shape)} and topk_weights {tuple(weights.shape)} must be [M, top_k]")
    if w13.n != 2 * w2.k or w13.experts != w2.experts:
        raise ValueError(f"w13 [{w13.experts}, {w13.n}, {w13.k}] and w2 [{w2.experts}, {w2.n}, {w2.k}] do not fit")
    if isinstance(w13, HopperWeight) and not w13.interleaved:
        raise ValueError("w13: prepare it with interleave=True")
