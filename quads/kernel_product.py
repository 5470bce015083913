"""W4A4 products of a rollout on a GPU: the kernels' twin of `quads.rollout.Nvfp4Product`.

Quantised operands are the emulator's bytes. Sums are those of the chip: on Blackwell the modelled FP4 arithmetic, on
Hopper bfloat16 tensor cores over exactly decoded operands, so the last bits of the FP32 accumulator may differ from the
emulator (bound: kernels/NOTES-gemm.md). Scopes whose rows choose differently (`token`, `tile`) compensate all blocks
with the unselected ones zeroed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quads.compensation import BlockSelector
from quads.emulation.quantizers import BLOCK
from quads.kernels import gemm, moe, support
from quads.kernels.compensate import quantize_rac
from quads.kernels.moe_details import routing
from quads.kernels.quantize import Granularity, quantize
from quads.qdq import PackedWeight


def unavailable() -> str:
    """Why products cannot run through the kernels here; "" where they can."""
    return support.missing_gpu() or support.missing_triton() or support.missing_ampere()


@dataclass(frozen=True)
class Operand:
    """Packed activations with their appended residual columns, as `quads.kernels.gemm` takes them."""

    packed: Tensor
    scales: Tensor
    outer: Tensor


class KernelProduct:
    """One weight ([N, K] or [experts, N, K]) in the kernels' order, and the selector of its residual blocks.

    whole: every row of a grouped product belongs to an expert here (no expert parallelism), so that nothing has to wait
    for the GPU to say where the rows end.
    """

    def __init__(self, weight: PackedWeight, selector: BlockSelector, *, whole: bool = False) -> None:
        self.selector, self.name, self.dtype, self.whole = selector, weight.name, weight.dtype, whole
        self._weight = weight
        self._prepared = gemm.prepare_weight(weight)

    def expert(self, index: int) -> KernelProduct:
        part = PackedWeight(
            self.name, self._weight.packed[index], self._weight.scales[index], self._weight.outer[index].reshape(()),
            self.dtype,
        )  # fmt: skip
        return KernelProduct(part, self.selector, whole=self.whole)

    def matmul(self, x: Tensor) -> Tensor:
        end = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
        a, blocks = self.quantize(x, end)
        return gemm.gemm(a, self._prepared, blocks=blocks).to(x.dtype)

    def grouped_matmul(self, x: Tensor, ends: Tensor) -> Tensor:
        y = x.new_zeros(x.shape[0], self._prepared.n)
        # Rows past the end belong to no expert here, and must not take part in a selection.
        used = x if self.whole else x[: int(ends[-1])]
        if used.shape[0]:
            a, blocks = self.quantize(used, ends)
            rows = torch.arange(used.shape[0], dtype=torch.int32, device=x.device)
            experts = torch.searchsorted(ends, rows, right=True).to(torch.int32)
            width = moe.slot_width(used.shape[0], self._prepared)
            grouping = routing.route(experts.unsqueeze(-1), self._prepared.experts, width)
            y[: used.shape[0]] = moe.grouped(a, self._prepared, grouping, blocks, swiglu_rows=False)
        return y

    def quantize(self, x: Tensor, ends: Tensor) -> tuple[Operand, Tensor | None]:
        """`x` [M, K] with its residual columns, and the K blocks (int32) that they repeat."""
        recipe, count = self.selector.recipe, self.selector.count
        scope: Any = recipe.rac_scope
        granularity: Granularity = "token" if recipe.activation_outer == "token" else "tensor"
        if count == 0:
            q = quantize(x, granularity=granularity)
            return Operand(q.packed, q.scales, q.outer), None
        if scope in ("token", "tile"):
            r = quantize_rac(x, self.selector.total, "all", granularity=granularity)
            keep = self.selector.row_mask(x, r.outer, ends)
            return _masked(Operand(r.packed, r.scales, r.outer), keep), r.blocks
        if scope in ("batch", "all"):
            r = quantize_rac(x, count, scope, granularity=granularity)
        else:
            kept = self.selector.kept(x).to(torch.int32)
            r = quantize_rac(x, count, "static", granularity=granularity, static_blocks=kept)
        return Operand(r.packed, r.scales, r.outer), r.blocks


def _masked(a: Operand, keep: Tensor) -> Operand:
    """Zero the residual columns of unselected blocks (`keep` bool [M, K/16])."""
    blocks = keep.shape[1]
    a.scales[:, blocks:].mul_(keep)
    a.packed[:, blocks * BLOCK // 2 :].mul_(keep.repeat_interleave(BLOCK // 2, dim=1))
    return a
