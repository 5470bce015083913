"""Activations and products of one layer on a GPU, through quads.kernels; nothing here waits for the device.

CUDA graphs replay what was captured, so whatever may change between replays lives in a buffer: the block list of a
`static` or `random` selection is written in place. `batch` is chosen by the kernels at every call. Where rows choose
for themselves (`token`, `tile`), the residual is spread to its own columns and all blocks are multiplied.
A graph pads a batch to a captured size: where rows share a selection or an outer scale, callers zero the padding rows
or leave them out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quads.emulation.quantizers import BLOCK
from quads.integrations.vllm_plugin import fp4
from quads.integrations.vllm_plugin.fp4 import Fp4Weight
from quads.kernels import compensate, gemm, moe
from quads.kernels.compensate import RacOperand
from quads.kernels.prepack import PreparedWeight, Quantized
from quads.kernels.quantize import quantize
from quads.recipes import Recipe

_LISTED = ("static", "random", "all")
_INVARIANT_TOKENS, _INVARIANT_PAIRS = 16, 2048  # what batch-invariant products are planned for


class BlockList:
    """The compensated blocks of a layer whose scope shares one list over calls: int32 [S], ascending, in place."""

    def __init__(self, recipe: Recipe, k: int, seed: int, device: torch.device) -> None:
        self.recipe, self.total, self.seed = recipe, k // BLOCK, seed
        self.blocks = torch.arange(recipe.rac_blocks(k), dtype=torch.int32, device=device)
        self.ranks = compensate.ranks(self.blocks, self.total)
        self.moved = True  # since the columns that it repeats were written behind a weight
        self.forget()
        self._age = 0
        self._draw()

    def calibrate(self, blocks: Tensor) -> None:
        """Keep `blocks` until the selection is refreshed."""
        self._keep(blocks)
        self.chosen = True

    def _keep(self, blocks: Tensor) -> None:
        self.blocks.copy_(blocks)
        self.ranks.copy_(compensate.ranks(self.blocks, self.total))
        self.moved = True

    def forget(self) -> None:
        """Have a static selection chosen anew at the next call that may."""
        self.chosen = self.recipe.rac_scope != "static"

    def end_of_rollout(self) -> None:
        """Count a rollout; after `rac_refresh` of them a static list is chosen anew and a random one drawn anew."""
        self._age += 1
        if self._age >= self.recipe.rac_refresh:
            self._age, self.seed = 0, self.seed + 1_000_003
            self.forget()
            self._draw()

    def _draw(self) -> None:
        if self.recipe.rac_scope == "random":
            drawn = torch.randperm(self.total, generator=torch.Generator().manual_seed(self.seed), device="cpu")
            self._keep(drawn[: self.blocks.numel()].sort().values)


class Activations:
    """Quantises rows for one weight of K = `k` under a recipe, residual columns appended."""

    def __init__(self, recipe: Recipe, k: int, seed: int, device: torch.device) -> None:
        self.recipe, self.k, self.count = recipe, k, recipe.rac_blocks(k)
        listed = self.count and recipe.rac_scope in _LISTED
        self.list = BlockList(recipe, k, seed, device) if listed else None
        self.every = torch.arange(k // BLOCK, dtype=torch.int32, device=device)

    @property
    def extra(self) -> int:
        """How many blocks the columns past K repeat."""
        spread = self.count and self.recipe.rac_scope in ("token", "tile")
        return self.every.numel() if spread else self.count

    @property
    def fixed(self) -> Tensor | None:
        """The blocks that calls repeat, None where nothing is repeated or each call chooses for all its rows."""
        if self.list is not None:
            return self.list.blocks
        return None if self.count == 0 or self.recipe.rac_scope == "batch" else self.every

    def repeat(self, weight: Fp4Weight, blocks: Tensor | None) -> None:
        """Write the columns `blocks` behind `weight`."""
        if blocks is not None:
            weight.gather(blocks)
        if self.list is not None:
            self.list.moved = False

    def forget_warm_up(self) -> None:
        """A CUDA graph is being captured: what was chosen so far came from the dummy tokens of its warm-up."""
        if self.list is not None:
            self.list.forget()

    def operand(self, x: Tensor, *, calibrate: bool = False) -> tuple[Quantized, Tensor | None]:
        """(quantised [M, K + extra], blocks that the extra columns repeat); `calibrate` may choose a static list."""
        granularity: Any = self.recipe.activation_outer
        if self.count == 0:
            return quantize(x, granularity=granularity), None
        if self.list is None:
            q = compensate.quantize_rac(x, self.count, self.recipe.rac_scope, granularity=granularity)  # type: ignore[arg-type]
            return (q, q.blocks) if self.recipe.rac_scope == "batch" else (self._spread(q), self.every)
        if calibrate and not self.list.chosen:
            q = compensate.quantize_rac(x, self.count, "batch", granularity=granularity)
            self.list.calibrate(q.blocks)
            return q, self.list.blocks
        lists: Any = {"static_blocks": self.list.blocks, "static_ranks": self.list.ranks}
        q = compensate.quantize_rac(x, self.count, "static", granularity=granularity, **lists)
        return q, self.list.blocks

    def _spread(self, q: RacOperand) -> RacOperand:
        """Residual columns of rows that chose differently, each at its own block, zero elsewhere."""
        rows, blocks = q.packed.shape[0], self.k // BLOCK
        shared = compensate.TILE_ROWS if self.recipe.rac_scope == "tile" else 1
        lists = q.blocks.repeat_interleave(shared, dim=0)[:rows].long()
        codes = q.packed.unflatten(1, (-1, BLOCK // 2))
        wide = torch.zeros_like(codes[:, :blocks])
        wide.scatter_(1, lists.unsqueeze(-1).expand(-1, -1, BLOCK // 2), codes[:, blocks:])
        scales = torch.zeros_like(q.scales[:, :blocks]).scatter_(1, lists, q.scales[:, blocks:])
        packed = torch.cat([codes[:, :blocks], wide], dim=1).flatten(1)
        return RacOperand(packed, torch.cat([q.scales[:, :blocks], scales], dim=1), q.outer, self.every)


def matmul(
    x: Tensor, weight: PreparedWeight, activations: Activations, *, calibrate: bool = False, invariant: bool = False
) -> Tensor:
    """x [M, K] times the weight [N, K] in the dtype of `x`: [M, N]. invariant: a row's bits are those it has alone."""
    q, blocks = activations.operand(x, calibrate=calibrate)
    out = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    plan_for = _INVARIANT_TOKENS if invariant else None
    return gemm.gemm(q, weight, blocks=blocks, out_dtype=out, plan_for=plan_for).to(x.dtype)


def fp4_matmul(x: Tensor, weight: Fp4Weight, activations: Activations, *, calibrate: bool = False) -> Tensor:
    """`matmul` through one of vLLM's own GEMMs: x bfloat16 or float16, one outer scale for all its rows."""
    return fp4.matmul(_operand(x, weight, activations, calibrate), weight, x.dtype)


def fp4_grouped_matmul(
    x: Tensor, weight: Fp4Weight, activations: Activations, ends: Tensor, *, calibrate: bool = False
) -> Tensor:
    """Rows of x [M, K], sorted by expert and ending at `ends`, times [experts, N, K]; rows past the end give 0.

    They take no part in a shared outer scale or selection either.
    """
    row = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return fp4.grouped_matmul(
        _operand(torch.where(row < ends[-1], x, 0.0), weight, activations, calibrate), weight, ends
    )


def _operand(x: Tensor, weight: Fp4Weight, activations: Activations, calibrate: bool) -> Quantized:
    """The quantised rows, once the columns that they repeat stand behind the weight."""
    q, blocks = activations.operand(x, calibrate=calibrate)
    if activations.fixed is None or (activations.list is not None and activations.list.moved):
        activations.repeat(weight, blocks)
    return q


def compile_ahead(
    prepared: tuple[PreparedWeight, PreparedWeight], activations: tuple[Activations, Activations]
) -> None:
    """Compile what `experts` may launch for any batch, so that no request waits; for vLLM's warm-up."""
    moe.compile_ahead(*prepared, residual=activations[0].extra > 0)


def experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    prepared: tuple[PreparedWeight, PreparedWeight],
    activations: tuple[Activations, Activations],
    *,
    elsewhere: bool = False,
    calibrate: bool = False,
    invariant: bool = False,
    padding: Tensor | None = None,
) -> Tensor:
    """A routed SwiGLU layer. elsewhere: some ids are negative, experts of other ranks, and give nothing.

    invariant: a row's bits are those it has alone, where its selection is its own or everybody's. padding: bool [M],
    rows that are no tokens: they go to no expert and take no part in a shared selection.
    """
    if padding is not None:
        elsewhere = True
        x, topk_ids = (rows.masked_fill(padding.unsqueeze(1), fill) for rows, fill in ((x, 0), (topk_ids, -1)))

    def quantize_h(h: Tensor) -> tuple[Quantized, Tensor | None]:
        # Rows of experts on other ranks are never written: they must not decide a shared selection.
        rows = h.masked_fill((topk_ids < 0).reshape(-1, 1), 0.0) if elsewhere else h
        return activations[1].operand(rows, calibrate=calibrate)

    def quantize_x(rows: Tensor) -> tuple[Quantized, Tensor | None]:
        return activations[0].operand(rows, calibrate=calibrate)

    plan_for = _INVARIANT_PAIRS if invariant else None
    quantizers: Any = {"quantize_x": quantize_x, "quantize_h": quantize_h}
    y = moe.moe(x.bfloat16(), topk_ids, topk_weights, *prepared, **quantizers, plan_for=plan_for)
    return y.to(x.dtype)
