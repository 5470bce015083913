"""Launches of the decode product, a CUDA C++ kernel."""

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
_CODE_STRIDE, _SCALE_STRIDE = 544, 96  # as in decode.cu


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Shape of the decode kernel: tokens of a thread block, warps that share K by runs of `run` chunks, row
    tiles of 64 (one for each set of such warps), ring depth, splits of K over the grid."""

    tokens: int
    k_warps: int = 8
    row_warps: int = 1
    stages: int = 4
    run: int = 4
    splits: int = 1
    min_blocks: int = 1

    @property
    def warps(self) -> int:
        return self.k_warps * self.row_warps

    @property
    def rows(self) -> int:
        return TILE * self.row_warps

    def shared(self, k_blocks: int, residual: bool) -> int:
        """Dynamic shared memory in bytes: rings and position table, or the partial sums that take their place."""
        token_stride = self.run * 32 + (32 if self.run > 1 else 0)
        token_bytes = (2 if residual else 1) * self.tokens * token_stride
        ahead = (self.stages - 2) // self.run + 1
        ring = self.stages * 4 * (_CODE_STRIDE + _SCALE_STRIDE) + (ahead + 1) * token_bytes
        table = 2 * k_blocks if residual else 0
        return max(self.warps * ring + table, self.k_warps * self.tokens * (self.rows + 4) * 4)


class _Operands(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "w_codes", "w_scales", "w_outer", "x_codes", "x_scales", "x_outer", "blocks", "out", "partial",
            "arrivals", "slots", "groups")),
        *((name, ctypes.c_int) for name in (
            "rows", "n", "tiles", "k_blocks", "extra", "outer_per_row", "slot_share", "list_per_group")),
    ]  # fmt: skip


def decode(
    a: Quantized,
    b: HopperWeight,
    plan: Plan,
    *,
    blocks: Tensor | None = None,
    grouping: Grouping | None = None,
    swiglu: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The product of `a` with one weight, or with the weight of each token block of `grouping`.

    `blocks` int32 [S], or [experts, S] with `grouping`.
    Result [M, N], or [rows_out, N] ([rows_out, N/2] with `swiglu`).
    """
    rows = a.packed.shape[0]
    extra = 0 if blocks is None else blocks.shape[-1]
    token_blocks = -(-rows // plan.tokens) if grouping is None else grouping.groups.numel()
    columns = b.n // 2 if swiglu else b.n
    out = torch.empty((grouping.rows_out if grouping else rows, columns), dtype=out_dtype, device=a.packed.device)
    if token_blocks == 0:
        return out
    tiles = b.codes.shape[1]
    row_blocks = -(-tiles // plan.row_warps)
    elements = plan.tokens * plan.rows
    partial, arrivals = split_buffers(plan.splits, row_blocks * token_blocks, elements, a.packed.device)
    operands = _Operands(
        *(None if x is None else x.data_ptr() for x in (
            b.codes, b.scales, b.outer, a.packed, a.scales, a.outer, blocks, out, partial, arrivals,
            grouping.slots if grouping else None, grouping.groups if grouping else None)),
        rows, b.n, tiles, b.k // BLOCK, extra, int(a.outer.numel() > 1), grouping.share if grouping else 1,
        int(blocks is not None and blocks.ndim == 2),
    )  # fmt: skip
    kernel = decode_kernel(plan, extra > 0, grouping is not None, swiglu, out_dtype == torch.float32, b.k // BLOCK)
    kernel((row_blocks, token_blocks, plan.splits), operands)
    return out


@cache
def decode_kernel(
    plan: Plan, residual: bool, grouped: bool, swiglu: bool, out_float: bool, k_blocks: int
) -> nvrtc.Kernel:
    """Compiled for one plan and kind of product, and kept."""
    return nvrtc.load(
        (_HERE / "e2m1.cuh", _HERE / "decode.cu"),
        "decode_gemm",
        decode_defines(plan, residual, grouped, swiglu, out_float),
        plan.warps * 32,
        plan.shared(k_blocks, residual),
    )


def decode_defines(
    plan: Plan, residual: bool, grouped: bool, swiglu: bool, out_float: bool
) -> tuple[tuple[str, int], ...]:
    values = {
        "TOKENS": plan.tokens, "K_WARPS": plan.k_warps,
        "ROW_WARPS": plan.row_warps, "STAGES": plan.stages, "SUPER": plan.run,
        "MIN_BLOCKS": plan.min_blocks, "RESIDUAL": residual, "GROUPED": grouped, "SWIGLU": swiglu,
        "OUT_FLOAT": out_float,
    }  # fmt: skip
    return tuple((key, int(value)) for key, value in values.items())


def split_buffers(
    splits: int, output_tiles: int, elements: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Partial sums and arrival counters of a product whose grid splits K; `elements` of one output tile."""
    if splits == 1:
        return None, None
    partial = torch.empty(splits * output_tiles * elements, dtype=torch.float32, device=device)
    return partial, _arrivals(device, 1 << (output_tiles - 1).bit_length())


@cache
def _arrivals(device: torch.device, count: int) -> Tensor:
    """Counters that every launch leaves at zero."""
    return torch.zeros(count, dtype=torch.int32, device=device)
