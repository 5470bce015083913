"""Launch of the grouped product for blocks of few rows of one expert each (grouped.cu)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from quads.emulation.quantizers import BLOCK
from quads.kernels.gemm_details import nvrtc
from quads.kernels.gemm_details.grouping import Grouping
from quads.kernels.prepack import TILE, HopperWeight, Quantized

_HERE = Path(__file__).parent
_STAGE_BYTES, _FRAGMENT_BYTES = 4 * (544 + 96), 1024  # as in grouped.cu


@dataclass(frozen=True, kw_only=True)
class GroupedPlan:
    """Rows of activations in a block, row tiles of 64 (one a warp) that share them, ring depth, blocks an SM."""

    tokens: int
    row_warps: int = 4
    stages: int = 3
    min_blocks: int = 1

    def shared(self, k_blocks: int, residual: bool) -> int:
        """Dynamic shared memory in bytes: two rounds of decoded activations, the rings, the order of K."""
        rounds = 2 * self.row_warps * self.tokens // 8 * _FRAGMENT_BYTES
        table = 4 * (-(-k_blocks // 4) * 4 + (k_blocks if residual else 0))
        return rounds + self.row_warps * self.stages * _STAGE_BYTES + table

    def defines(self, residual: bool, swiglu: bool, out_float: bool) -> tuple[tuple[str, int], ...]:
        values = {
            "TOKENS": self.tokens, "ROW_WARPS": self.row_warps, "STAGES": self.stages, "MIN_BLOCKS": self.min_blocks,
            "RESIDUAL": residual, "SWIGLU": swiglu, "OUT_FLOAT": out_float,
        }  # fmt: skip
        return tuple((key, int(value)) for key, value in values.items())


class _Operands(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "w_codes", "w_scales", "w_outer", "x_codes", "x_scales", "x_outer", "blocks", "out", "slots", "groups")),
        *((name, ctypes.c_int) for name in (
            "n", "tiles", "k_blocks", "extra", "outer_per_row", "slot_share", "list_per_group")),
    ]  # fmt: skip


def grouped(
    a: Quantized,
    b: HopperWeight,
    plan: GroupedPlan,
    grouping: Grouping,
    *,
    blocks: Tensor | None = None,
    swiglu: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Each routed row of `a` times its expert's weight: [rows_out, N], or [rows_out, N/2] with `swiglu`.

    blocks: int32 [S] or [experts, S]. `grouping` has blocks of `plan.tokens` slots.
    """
    columns = b.n // 2 if swiglu else b.n
    out = torch.empty((grouping.rows_out, columns), dtype=out_dtype, device=a.packed.device)
    token_blocks = grouping.groups.numel()
    if token_blocks == 0:
        return out
    tiles, k_blocks, extra = b.codes.shape[1], b.k // BLOCK, 0 if blocks is None else blocks.shape[-1]
    operands = _Operands(
        *(None if x is None else x.data_ptr() for x in (
            b.codes, b.scales, b.outer, a.packed, a.scales, a.outer, blocks, out, grouping.slots, grouping.groups)),
        b.n, tiles, k_blocks, extra, int(a.outer.numel() > 1), grouping.share,
        int(blocks is not None and blocks.ndim == 2),
    )  # fmt: skip
    kernel = grouped_kernel(plan, extra > 0, swiglu, out_dtype == torch.float32, k_blocks)
    kernel((-(-tiles // plan.row_warps), token_blocks, 1), operands)
    return out


@cache
def grouped_kernel(plan: GroupedPlan, residual: bool, swiglu: bool, out_float: bool, k_blocks: int) -> nvrtc.Kernel:
    """Compiled for one plan and kind of product, and kept."""
    return nvrtc.load(
        (_HERE / "e2m1.cuh", _HERE / "grouped.cu"),
        "grouped_gemm",
        plan.defines(residual, swiglu, out_float),
        plan.row_warps * TILE // 2,
        plan.shared(k_blocks, residual),
    )
