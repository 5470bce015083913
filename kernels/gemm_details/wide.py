"""Launch of the wgmma product for some tens of tokens (wide.cu)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from quads.emulation.quantizers import BLOCK
from quads.kernels.gemm_details import nvrtc
from quads.kernels.gemm_details.hopper import split_buffers
from quads.kernels.prepack import TILE, HopperWeight, Quantized

_HERE = Path(__file__).parent
_TILE_BYTES = 4 * 8 * 160 + 512  # as in wide.cu


@dataclass(frozen=True, kw_only=True)
class WidePlan:
    """Shape of the wgmma kernel: tokens of a thread block; its rows are 64 row_tiles row_groups; warpgroups that share
    K; ring depth; splits of K over the grid."""

    tokens: int
    row_tiles: int = 1
    row_groups: int = 4
    k_groups: int = 1
    stages: int = 4
    splits: int = 1

    @property
    def threads(self) -> int:
        return 128 * self.row_groups * self.k_groups

    @property
    def rows(self) -> int:
        return TILE * self.row_tiles * self.row_groups

    def shared(self, k_blocks: int, residual: bool) -> int:
        """Dynamic shared memory in bytes, with slack to align it to 1024."""
        buffers = 3 * (2 if residual else 1) * 2 * self.tokens * 128
        rings = self.row_groups * self.stages * self.row_tiles * _TILE_BYTES
        table = 16 * -(-k_blocks // 8) if residual else 0
        sums = self.k_groups * self.tokens * (self.rows + 4) * 4
        return max(self.k_groups * (buffers + rings) + table, sums) + 1024

    def defines(self, residual: bool, out_float: bool) -> nvrtc.Defines:
        values = {
            "TOKENS": self.tokens, "ROW_TILES": self.row_tiles, "ROW_GROUPS": self.row_groups,
            "K_GROUPS": self.k_groups, "STAGES": self.stages, "RESIDUAL": residual, "OUT_FLOAT": out_float,
        }  # fmt: skip
        return tuple((key, int(value)) for key, value in values.items())


class _Operands(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "w_codes", "w_scales", "w_outer", "x_codes", "x_scales", "x_outer", "blocks", "out", "partial",
            "arrivals")),
        *((name, ctypes.c_int) for name in ("rows", "n", "tiles", "k_blocks", "extra", "outer_per_row")),
    ]  # fmt: skip


def wide(
    a: Quantized, b: HopperWeight, plan: WidePlan, *, blocks: Tensor | None = None, out_dtype: torch.dtype
) -> Tensor:
    """The product [M, N] of `a` with one weight; arguments as `gemm`, already checked."""
    rows, extra = a.packed.shape[0], 0 if blocks is None else blocks.shape[-1]
    out = torch.empty((rows, b.n), dtype=out_dtype, device=a.packed.device)
    tiles = b.codes.shape[1]
    grid = (-(-tiles * TILE // plan.rows), -(-rows // plan.tokens), plan.splits)
    partial, arrivals = split_buffers(plan.splits, grid[0] * grid[1], plan.tokens * plan.rows, a.packed.device)
    operands = _Operands(
        *(None if x is None else x.data_ptr() for x in (
            b.codes, b.scales, b.outer, a.packed, a.scales, a.outer, blocks, out, partial, arrivals)),
        rows, b.n, tiles, b.k // BLOCK, extra, int(a.outer.numel() > 1),
    )  # fmt: skip
    _kernel(plan, extra > 0, out_dtype == torch.float32, b.k // BLOCK)(grid, operands)
    return out


@cache
def _kernel(plan: WidePlan, residual: bool, out_float: bool, k_blocks: int) -> nvrtc.Kernel:
    return nvrtc.load(
        (_HERE / "e2m1.cuh", _HERE / "wide.cu"),
        "wide_gemm",
        plan.defines(residual, out_float),
        plan.threads,
        plan.shared(k_blocks, residual),
        preamble=instruction(plan.tokens),
    )


def instruction(tokens: int) -> str:
    """CUDA C++ of `wgmma` m64n`tokens`k16 with A in registers, and of `wgmma_operands`, which pins its registers."""
    count = tokens // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    fragment = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    pins = " ".join(f'asm volatile("" : "+f"(d[{i}]) :: "memory");' for i in range(count))
    pins += " ".join(f'asm volatile("" : "+r"(a[{m}][{i}]) :: "memory");' for m in range(4) for i in range(4))
    name = f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16"
    return f"""
__device__ __forceinline__ void wgmma(float (&d)[{count}], const unsigned (&a)[4], unsigned long long b) {{
    asm volatile("{name} {{{accumulators}}}, {{{fragment}}}, %{count + 4}, 1, 1, 1, 0;"
                 : {outputs} : {inputs}, "l"(b));
}}
__device__ __forceinline__ void wgmma_operands(float (&d)[{count}], unsigned (&a)[4][4]) {{ {pins} }}
"""
