"""Quantise to packed NVFP4 on the GPU: the codes and scales of `quads.emulation.quantizers`, bit for bit.

Dialects
    exact   g = outer;  s = e4m3_sat(fl(fl(v / 6) / g));  code = e2m1_sat(fl(x / fl(s * g)))
    vllm    G = outer, the encode direction (2688 / amax); s = e4m3_sat(fl(G * fl(v * rcp(6))));
            code = e2m1_sat(fl(x * rcp(fl(s * rcp(G))))) and 0 where s = 0, with rcp = rcp.approx.ftz.f32
            (the interpreter takes the correctly rounded reciprocal instead); the emulator's `vllm_kernel`
v is the block's max |x|. A block whose scale is 0 gets codes 0 with the sign kept. NaN and Inf are not looked for
(that would wait for the GPU); their codes are unspecified. Layouts: `linear` [M, K/16], or the 128x4 swizzle of
cuBLASLt and CUTLASS, flat, whose padding is written as zero bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quads.kernels import support

BLOCK = 16
Granularity = Literal["tensor", "token"]
Dialect = Literal["exact", "vllm"]
Layout = Literal["linear", "128x4"]
_TILE = 256  # blocks a program holds
_BLOCKS_A_THREAD = 4  # measured best on the H200, with two warps (NOTES-quantize.md)
_WIDEST_ROW = 2048  # blocks of a row that one program can hold, to find the row's amax in the same pass


@dataclass(frozen=True)
class PackedNVFP4:
    """Packed codes uint8 [M, K/2] (even K in the low nibble), E4M3 scale bytes uint8, outer scale float32.

    Scales are [M, K/16] (linear) or flat (128x4). Outer is [] (tensor) or [M, 1] (token), in the dialect's direction.
    """

    packed: Tensor
    scales: Tensor
    outer: Tensor


def quantize(
    x: Tensor,
    outer: Tensor | None = None,
    *,
    granularity: Granularity = "tensor",
    dialect: Dialect = "exact",
    layout: Layout = "linear",
    out: tuple[Tensor, Tensor] | None = None,
) -> PackedNVFP4:
    """Quantise `x` [..., K] (float32, bfloat16, float16; K % 16 == 0), leading dimensions flattened to M.

    outer: float32 with 1 (tensor) or M (token) elements; None computes it from amax (exact dialect only).
    out: packed codes [M, K/2] and scale bytes, contiguous, to write into (a refit keeps its storage).
    Raises ValueError on a bad shape, dtype or outer scale, RuntimeError where no kernel can run.
    """
    rows = as_rows(x)
    support.check_launch(x, "quantize")
    if dialect == "vllm" and outer is None:
        raise ValueError("outer is None: the vllm dialect takes its global scale from the checkpoint")
    scale_shape = scales_shape(rows.shape[0], rows.shape[1], layout)
    packed, scales = out or (
        torch.empty(rows.shape[0], rows.shape[1] // 2, dtype=torch.uint8, device=x.device),
        torch.empty(scale_shape, dtype=torch.uint8, device=x.device),
    )
    _check_out(packed, scales, (rows.shape[0], rows.shape[1] // 2), scale_shape)
    in_pass = outer is None and granularity == "token" and rows.shape[1] <= BLOCK * _WIDEST_ROW
    scale = empty_outer(rows, granularity) if in_pass else outer_or_amax(rows, outer, granularity)
    if scales.numel() and rows.shape[1]:
        _launch(rows, packed, scales.view(-1), scale, granularity, dialect, layout, in_pass)
    return PackedNVFP4(packed, scales.view(-1) if layout == "128x4" else scales, scale)


def _check_out(packed: Tensor, scales: Tensor, packed_shape: tuple[int, int], scale_shape: tuple[int, int]) -> None:
    numel = scale_shape[0] * scale_shape[1]
    if (
        packed.shape != packed_shape
        or scales.numel() != numel
        or not (packed.is_contiguous() and scales.is_contiguous())
    ):
        raise ValueError(
            f"out: packed {tuple(packed.shape)} and scales {tuple(scales.shape)} do not fit"
            f" {packed_shape} and {scale_shape}, contiguous"
        )


def _launch(
    rows: Tensor,
    packed: Tensor,
    scales: Tensor,
    outer: Tensor,
    granularity: Granularity,
    dialect: Dialect,
    layout: Layout,
    in_pass: bool,
) -> None:
    from quads.kernels.quantize_details.quantize_jit import quantize_kernel

    m, blocks = rows.shape[0], rows.shape[1] // BLOCK
    scale_rows, scale_columns = scales_shape(m, rows.shape[1], layout)
    tile = tile_shape(scale_columns, whole_row=in_pass)
    programs = -(-scale_rows // tile["ROWS"]) * -(-scale_columns // tile["BLOCKS"])
    quantize_kernel[(programs,)](
        rows, packed.view(torch.int32), scales, outer, m, blocks, scale_rows, scale_columns,
        rows.stride(0) * rows.element_size() // 4,
        **tile, TOKEN=granularity == "token", AMAX=in_pass, SWIZZLED=layout == "128x4", VLLM=dialect == "vllm",
        NATIVE=support.native_level(), enable_fp_fusion=False, num_warps=warps(tile),
    )  # fmt: skip


def tile_shape(blocks: int, *, whole_row: bool) -> dict[str, int]:
    """ROWS and BLOCKS of a program: powers of two, about `_TILE` blocks together, or at least one whole row."""
    across = 1 << max(0, blocks - 1).bit_length()
    across = across if whole_row else min(across, _TILE)
    return {"ROWS": max(1, _TILE // across), "BLOCKS": across}


def warps(tile: dict[str, int]) -> int:
    """Warps that give each thread `_BLOCKS_A_THREAD` blocks, or more where a row is wider than 16 warps take."""
    return max(1, min(16, tile["ROWS"] * tile["BLOCKS"] // (32 * _BLOCKS_A_THREAD)))


def scales_shape(m: int, k: int, layout: Layout) -> tuple[int, int]:
    """Rows and columns of scale bytes, padding included."""
    if layout == "linear":
        return m, k // BLOCK
    if layout == "128x4":
        return -(-m // 128) * 128, -(-(k // BLOCK) // 4) * 4
    raise ValueError(f"layout '{layout}' is unknown (known: linear, 128x4)")


def outer_or_amax(rows: Tensor, outer: Tensor | None, granularity: Granularity) -> Tensor:
    """`outer` checked and shaped [] or [M, 1], or amax / 2688 (1 where amax is 0)."""
    if granularity not in ("tensor", "token"):
        raise ValueError(f"granularity '{granularity}' is unknown (known: tensor, token)")
    if outer is None:
        return outer_scale(rows, granularity)
    wanted = 1 if granularity == "tensor" else rows.shape[0]
    if outer.numel() != wanted:
        raise ValueError(f"outer of shape {tuple(outer.shape)}: a scale per {granularity} has {wanted} element(s)")
    return outer.to(device=rows.device, dtype=torch.float32).reshape(() if granularity == "tensor" else (-1, 1))


def outer_scale(rows: Tensor, granularity: Granularity = "tensor") -> Tensor:
    """amax / 2688 as float32 [] or [M, 1], correctly rounded, 1 where amax is 0 (and for an empty tensor)."""
    if granularity == "token":
        return _row_outers(rows)
    amax = _tensor_amax(rows)
    # A Python scalar will not do: torch multiplies by its rounded reciprocal on CUDA.
    return torch.where(amax > 0, amax / amax.new_full((), 2688.0), 1.0)


def _row_outers(rows: Tensor) -> Tensor:
    """One launch, which at decoding is what counts."""
    from quads.kernels.quantize_details.quantize_jit import row_outer_kernel

    outer = empty_outer(rows, "token")
    width = min(4096, 1 << max(4, (rows.shape[1] - 1).bit_length()))
    if rows.shape[0]:
        steps = -(-rows.shape[1] // width)
        row_outer_kernel[(rows.shape[0],)](rows, outer, rows.shape[1], rows.stride(0), WIDTH=width, STEPS=steps)
    return outer


def _tensor_amax(rows: Tensor) -> Tensor:
    from quads.kernels.quantize_details.quantize_jit import amax_kernel

    bits = torch.zeros((), dtype=torch.int32, device=rows.device)
    flat = rows.reshape(-1)
    if flat.numel():
        width, steps = 4096, 4
        amax_kernel[(-(-flat.numel() // (width * steps)),)](flat, bits, flat.numel(), WIDTH=width, STEPS=steps)
    return bits.view(torch.float32)


def empty_outer(rows: Tensor, granularity: Granularity) -> Tensor:
    """Uninitialised outer scale of the right shape, for a kernel to fill."""
    shape = () if granularity == "tensor" else (rows.shape[0], 1)
    return torch.empty(shape, dtype=torch.float32, device=rows.device)


def as_rows(x: Tensor, name: str = "x") -> Tensor:
    """`x` as [M, K], unit stride along K and 16-byte aligned rows, or ValueError. A view where `x` allows one."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name} has dtype {x.dtype}: NVFP4 quantisation takes float32, bfloat16 or float16")
    if x.ndim == 0 or x.shape[-1] % BLOCK or x.shape[-1] == 0:
        raise ValueError(f"{name} of shape {tuple(x.shape)}: K must be a positive multiple of {BLOCK}")
    rows = x.reshape(-1, x.shape[-1])
    aligned = rows.stride(0) * x.element_size() % 16 == 0 and rows.data_ptr() % 16 == 0
    return rows if rows.stride(1) == 1 and aligned else rows.clone(memory_format=torch.contiguous_format)
