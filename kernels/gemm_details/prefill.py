"""The large product on Hopper: bf16 operands (code * block scale, exact), wgmma, alpha in FP32 before the cast.

Persistent over output tiles, operands and result through TMA. cuBLAS reaches the same rate but has no epilogue that
multiplies by a vector in FP32 before the cast, so it would need a float32 result and one more pass over it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _product(
    x_desc,
    w_desc,
    y_desc,
    x_outer,
    w_outer,
    M,
    N,
    K,
    OUTER_PER_ROW: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
    SUBTILE: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    alpha_w = tl.load(w_outer)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        band = tile // (GROUP * tiles_n)
        height = min(tiles_m - band * GROUP, GROUP)
        row = (band * GROUP + (tile % (GROUP * tiles_n)) % height) * BM
        column = (tile % (GROUP * tiles_n)) // height * BN
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, tl.cdiv(K, BK)):
            x = x_desc.load([row, k * BK])
            w = w_desc.load([column, k * BK])
            acc = tl.dot(x, w.T, acc)
        if OUTER_PER_ROW:
            rows = row + tl.arange(0, BM)
            alpha = tl.load(x_outer + rows, mask=rows < M, other=0.0) * alpha_w
            y = acc * alpha[:, None]
        else:
            y = acc * (tl.load(x_outer) * alpha_w)
        if SUBTILE:
            halves = tl.permute(tl.reshape(y, (BM, 2, BN // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            y_desc.store([row, column], left.to(y_desc.dtype))
            y_desc.store([row, column + BN // 2], right.to(y_desc.dtype))
        else:
            y_desc.store([row, column], y.to(y_desc.dtype))


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
    (m, k), n = x.shape, w.shape[0]
    bm, bn, bk = tile
    y = torch.empty((m, n), dtype=out_dtype, device=x.device)
    programs = min(torch.cuda.get_device_properties(x.device).multi_processor_count, -(-m // bm) * -(-n // bn))
    _product[(programs,)](
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
