"""The large products on Hopper: bf16 operands (code * block scale, exact), wgmma, alpha in FP32 before the cast.

Dense and grouped. Operands go through TMA, the dense result too. cuBLAS reaches the same rate but has no epilogue that
multiplies by a vector in FP32 before the cast, so it would need a float32 result and one more pass over it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quads.kernels.gemm_details.expand import expand_routed, expand_weight
from quads.kernels.gemm_details.grouping import Grouping
from quads.kernels.prepack import HopperWeight, PreparedWeight, Quantized

ROWS = 128  # slots of a row block of the grouped product
# Mean rows of an expert from which the grouped product pays: decoding all experts once to bf16 and multiplying two row
# blocks an expert takes as long as seven rounds of the kernel that decodes weights for each 32 rows (NOTES-gemm.md).
CROSSOVER = 200


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What one program of the grouped product multiplies, ROWS x columns in steps of `depth`, and its walk.

    band: row blocks that take turns at one tile of columns.
    """

    columns: int = 256
    depth: int = 64
    stages: int = 4
    warps: int = 8
    band: int = 8


def takes(pairs: int, weight: PreparedWeight) -> bool:
    """Whether `grouped` is the way for `pairs` routed rows."""
    return isinstance(weight, HopperWeight) and pairs >= CROSSOVER * weight.experts


def grouped(a: Quantized, weight: HopperWeight, grouping: Grouping, blocks: Tensor | None, *, swiglu: bool) -> Tensor:
    """Each routed row of `a` times its expert's weight, bfloat16 [rows_out, N], or [rows_out, N / 2] after SwiGLU.

    blocks int32 [S] or [experts, S]: the K blocks that the last 16 S columns of `a` repeat. The bits of a row do not
    depend on the rows beside it. Rows that no slot names are not written.
    Raises ValueError where row blocks are not of ROWS slots, or where SwiGLU does not meet an interleaved weight.
    """
    if grouping.slots.numel() != ROWS * grouping.groups.numel():
        raise ValueError(f"grouping: blocks of {grouping.slots.numel() / grouping.groups.numel()} slots, not {ROWS}")
    if swiglu != weight.interleaved:
        raise ValueError(f"weight: interleaved is {weight.interleaved}, swiglu {swiglu}")
    x = expand_routed(a, grouping)
    w = expand_weight(weight, blocks, grouping.groups)
    return grouped_product(x, w, a.outer, weight.outer, grouping, swiglu=swiglu)


def grouped_product(
    x: Tensor,
    w: Tensor,
    x_outer: Tensor,
    w_outer: Tensor,
    grouping: Grouping,
    *,
    swiglu: bool,
    tile: Tile = Tile(),
) -> Tensor:
    """`grouped` for operands already decoded: x [slots, K] in the order of the slots, w [experts, N, K], contiguous."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from quads.kernels.gemm_details import prefill_jit

    (experts, n, k), row_blocks = w.shape, grouping.groups.numel()
    out = torch.empty((grouping.rows_out, n // 2 if swiglu else n), dtype=torch.bfloat16, device=x.device)
    tiles = row_blocks * -(-n // tile.columns)
    if tiles == 0:
        return out
    prefill_jit.grouped_product[(tiles,)](
        TensorDescriptor.from_tensor(x, [ROWS, tile.depth]),
        TensorDescriptor.from_tensor(x, [ROWS // 2, tile.depth]),
        TensorDescriptor.from_tensor(w.view(experts * n, k), [tile.columns, tile.depth]),
        out, grouping.slots, grouping.groups, x_outer, w_outer, n, grouping.share,
        STEPS=-(-k // tile.depth), OUTER_PER_ROW=x_outer.numel() > 1, SWIGLU=swiglu,
        BM=ROWS, BN=tile.columns, BK=tile.depth, BAND=tile.band,
        num_stages=tile.stages, num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def product(
    x: Tensor,
    w: Tensor,
    x_outer: Tensor,
    w_outer: Tensor,
    out_dtype: torch.dtype,
    *,
    tile: tuple[int, int, int] = (128, 256, 64),
    stages: int | None = None,
    warps: int = 8,
    flatten: bool = False,
    subtile: bool = True,
    group: int = 8,
) -> Tensor:
    """cast((x w^T) * (x_outer * w_outer)) for bfloat16 x [M, K], w [N, K], both contiguous."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from quads.kernels.gemm_details import prefill_jit

    (m, k), n = x.shape, w.shape[0]
    bm, bn, bk = tile
    y = torch.empty((m, n), dtype=out_dtype, device=x.device)
    programs = min(torch.cuda.get_device_properties(x.device).multi_processor_count, -(-m // bm) * -(-n // bn))
    prefill_jit.product[(programs,)](
        TensorDescriptor.from_tensor(x, [bm, bk]),
        TensorDescriptor.from_tensor(w, [bn, bk]),
        TensorDescriptor.from_tensor(y, [bm, bn // 2 if subtile else bn]),
        x_outer,
        w_outer,
        m,
        n,
        k,
        OUTER_PER_ROW=x_outer.numel() > 1,
        BM=bm,
        BN=bn,
        BK=bk,
        GROUP=group,
        PROGRAMS=programs,
        FLATTEN=flatten,
        SUBTILE=subtile,
        num_stages=stages or (4 if out_dtype == torch.bfloat16 else 3),  # the result goes through shared memory
        num_warps=warps,
    )
    return y
