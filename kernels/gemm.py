"""The W4A4 product y = cast(fl(acc * fl(outer_a * outer_b))), acc = sum over K of (code * block scale) products.

Four ways, by chip and number of tokens (`choose`, which can be asked):
    decode    Hopper, few tokens: both operands decoded in registers, mma.sync (CUDA C++ through NVRTC)
    wide      Hopper, some tens of tokens: activations decoded once for a thread block, wgmma (likewise)
    prefill   Hopper, many tokens: both operands decoded to bfloat16 once (exact), wgmma, alpha in the epilogue
    native    FP4 tensor cores (Triton dot_scaled); its portable twin runs in Triton's interpreter and on older chips
RAC: columns of `a` past K repeat the K blocks of 16 named by `blocks`; no way stores the weight's columns twice.
Order of K (which FP32 results depend on, in their last bits): NOTES-gemm.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from quads.emulation.quantizers import BLOCK
from quads.kernels import support
from quads.kernels.gemm_details import expand, hopper, native, nvrtc, wide
from quads.kernels.prepack import (
    TILE,
    HopperWeight,
    NativeWeight,
    PreparedWeight,
    Quantized,
    prepare_hopper,
    prepare_native,
)

Way = Literal["decode", "wide", "prefill", "native"]
DECODE_TOKENS = 192  # at most; above, decoding once to bfloat16 is faster on the H200 (NOTES-gemm.md)
_PROCESSORS = 132


def gemm(
    a: Quantized,
    b: Quantized | PreparedWeight,
    *,
    blocks: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    plan_for: int | None = None,
) -> Tensor:
    """A B^T [M, N] in bfloat16 or float32.

    a: packed codes uint8 [M, Kp/2], block scales E4M3 bytes uint8 [M, Kp/16] (linear), outer float32 [] or [M, 1].
    b: packed [N, K/2], scales [N, K/16], outer []; or `prepare_weight` of it, which saves the reordering each call.
    blocks: int32 [S], distinct: the K blocks that the last 16 S columns of `a` repeat; Kp = K + 16 S.
    plan_for: choose way and plan as for so many tokens, whatever M is; a row's bits then do not depend on the others.
    Raises ValueError on shapes that do not fit, RuntimeError where no kernel can run.
    """
    weight = b if isinstance(b, HopperWeight | NativeWeight) else prepare_weight(b)
    a = _checked(a, weight, blocks, out_dtype)
    if weight.experts != 1:
        raise ValueError(f"b: holds {weight.experts} experts; a dense product takes one weight")
    if a.packed.shape[0] == 0:
        return torch.empty((0, weight.n), dtype=out_dtype, device=a.packed.device)
    if isinstance(weight, NativeWeight):
        tile = native.tile_for(native.family(), plan_for or a.packed.shape[0])
        return native.product(a, weight, tile, blocks=blocks, out_dtype=out_dtype)
    tokens, residual = plan_for or a.packed.shape[0], blocks is not None
    way = choose(tokens, weight, residual=residual)
    if way == "decode":
        plan = decode_plan(tokens, weight)
        return hopper.decode(a, weight, plan, blocks=blocks, out_dtype=out_dtype)
    if way == "wide":
        plan_of_groups = wide_plan(tokens, weight, residual=residual)
        return wide.wide(a, weight, plan_of_groups, blocks=blocks, out_dtype=out_dtype)
    return _prefill(a, weight, blocks, out_dtype)


def prepare_weight(b: Quantized, *, interleave: bool = False, out: PreparedWeight | None = None) -> PreparedWeight:
    """`b` ([N, K] or [experts, N, K]) in the order the kernels of this device read it; once per refit.

    out: written in place, so that CUDA graphs keep seeing its storage. interleave: N is a gate half and an up half,
    whose rows are laid out for the SwiGLU of `moe`; the outer scale may then be [experts, 2].
    """
    support.check_launch(b.packed, "gemm")
    if isinstance(out, HopperWeight) or (out is None and _on_hopper()):
        return prepare_hopper(b, interleave=interleave, out=out)
    return prepare_native(b, halves=interleave, out=out)


def choose(tokens: int, weight: PreparedWeight, *, residual: bool = False) -> Way:
    """The way that `gemm` takes for `tokens` rows of activations, with RAC's columns or without."""
    if isinstance(weight, NativeWeight):
        return "native"
    return hopper_way(tokens, residual=residual)


def hopper_way(tokens: int, *, residual: bool = False) -> Way:
    """`choose` on Hopper, whatever the weight."""
    if tokens <= (16 if residual else 32):
        return "decode"
    return "wide" if tokens <= DECODE_TOKENS else "prefill"


def decode_plan(tokens: int, weight: HopperWeight) -> hopper.Plan:
    """Thread-block shape of the decode kernel, from measurements on the H200 (NOTES-gemm.md)."""
    width = next((t for t in (8, 16) if tokens <= t), 32)
    chunks = -(-weight.k // 64)
    warps = min(16 if width <= 16 else 8, 1 << (chunks - 1).bit_length())
    tiles = weight.codes.shape[1] * -(-tokens // width)
    splits = max(1, min(_PROCESSORS // tiles, chunks // (2 * warps)))
    return hopper.Plan(tokens=width, k_warps=warps, stages=2 if width == 16 else 3, run=1, splits=splits)


def wide_plan(tokens: int, weight: HopperWeight, *, residual: bool) -> wide.WidePlan:
    """Thread-block shape of the wgmma kernel, from measurements on the H200 (NOTES-gemm.md)."""
    width = 32 if tokens <= 32 else 64
    groups = 1 if residual or width == 32 else 2
    plan = wide.WidePlan(tokens=width, row_groups=4 // groups, k_groups=groups, stages=4 if groups == 1 else 3)
    thread_blocks = -(-weight.codes.shape[1] * TILE // plan.rows) * -(-tokens // width)
    steps = -(-weight.k // 128)
    return replace(plan, splits=max(1, min(_PROCESSORS // thread_blocks, steps // groups, 8)))


def _prefill(a: Quantized, weight: HopperWeight, blocks: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    from quads.kernels.gemm_details import prefill

    x, w = expand.expand_tokens(a), expand.expand_weight(weight, blocks)[0]
    if weight.n % 8 == 0:
        return prefill.product(x, w, a.outer, weight.outer, out_dtype)
    product = torch.mm(x, w.t(), out_dtype=torch.float32)  # rows of the result are not aligned for TMA
    return (product * (a.outer * weight.outer)).to(out_dtype)


def _on_hopper() -> bool:
    return not support.interpreting() and not support.missing_hopper() and nvrtc.unavailable() is None


class _Operand:
    """Contiguous tensors of a checked operand."""

    def __init__(self, packed: Tensor, scales: Tensor, outer: Tensor) -> None:
        self.packed, self.scales, self.outer = packed, scales, outer


def _checked(a: Quantized, weight: PreparedWeight, blocks: Tensor | None, out_dtype: torch.dtype) -> _Operand:
    support.check_launch(a.packed, "gemm")
    extra = 0 if blocks is None else blocks.shape[-1]
    rows, width = a.packed.shape[0], weight.k // BLOCK + extra
    if a.packed.shape != (rows, width * BLOCK // 2) or a.scales.shape != (rows, width):
        raise ValueError(
            f"a: packed {tuple(a.packed.shape)} and scales {tuple(a.scales.shape)} do not fit"
            f" K = {weight.k} and {extra} repeated blocks"
        )
    if a.outer.numel() not in (1, rows):
        raise ValueError(f"a: outer scale of shape {tuple(a.outer.shape)} is neither [] nor [{rows}, 1]")
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out_dtype: {out_dtype} is neither bfloat16 nor float32")
    if blocks is not None and blocks.dtype != torch.int32:
        raise ValueError(f"blocks: dtype {blocks.dtype} is not int32")
    return _Operand(a.packed.contiguous(), a.scales.contiguous(), a.outer.float().contiguous())
