"""The activations of one product, quantised once and shared by every variant that multiplies them.

All residual blocks are quantised, then each variant keeps some: a block of Q(R) depends on its own 16 values and on
the outer scale of X only, so keeping block j of Q(R) gives the same codes as quantising R_S alone (method.md).
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quads.attribution.variants import Variant
from quads.emulation import quantizers, residual
from quads.emulation.quantizers import BLOCK

SEED_STRIDE = 1_000_003  # apart enough that two seeds never share a layer's draw


class QuantizedRows:
    """Q(X) and Q(X - Q(X)) of x [M, K], without their outer scale: exact float32 values; `outer` [M, 1] or []."""

    def __init__(self, x: Tensor, granularity: Any, name: str, site_index: int) -> None:
        quantizers.check_input(x, f"activations of {name}")
        self.x, self.site_index = x, site_index
        self.q = quantizers.quantize(x, granularity=granularity)
        self.value = quantizers.unscaled(self.q)
        self.blocks = x.shape[-1] // BLOCK

    @property
    def outer(self) -> Tensor:
        """Outer scale of every row, float32 [M, 1]."""
        return self.q.outer.expand(self.x.shape[0], 1)

    @cached_property
    def _residual(self) -> Tensor:
        return residual.residual(self.x, self.q)

    @cached_property
    def compensation(self) -> Tensor:
        """Q(R) of every block, without its outer scale, float32 [M, K]."""
        return quantizers.unscaled(quantizers.quantize(self._residual, self.q.outer))

    @cached_property
    def _shared_order(self) -> Tensor:
        scores = residual.block_scores(self._residual, self.q.outer).sum(dim=0)
        return torch.sort(scores, descending=True, stable=True).indices

    @cached_property
    def _row_order(self) -> Tensor:
        """Each row's blocks by its own score: the unit is that row's outer scale, as if it were alone."""
        exponent = torch.frexp(self.outer).exponent - 1
        alone = torch.ldexp(self._residual, -exponent)
        scores = residual.block_scores(alone, torch.ones(()))
        return torch.sort(scores, dim=-1, descending=True, stable=True).indices

    def keep(self, variant: Variant) -> Tensor:
        """Blocks that `variant` compensates: bool [1, K/16] where all rows share them, [M, K/16] per token."""
        count = block_count(variant.ratio, self.blocks)
        if variant.scope == "token":
            order = self._row_order
        elif variant.scope == "random":
            generator = torch.Generator().manual_seed(variant.seed * SEED_STRIDE + self.site_index)
            order = torch.randperm(self.blocks, generator=generator).unsqueeze(0)
        else:
            order = self._shared_order.unsqueeze(0)
        kept = torch.zeros(order.shape, dtype=torch.bool)
        return kept.scatter(-1, order[:, :count], True)

    def columns(self, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Q(R_S) as extra columns [M, 16 S], and which blocks (int64 [S], ascending) of the weight they multiply."""
        blocks = keep.any(dim=0).nonzero().squeeze(-1)
        values = residual.gather_blocks(self.compensation, blocks)
        if keep.shape[0] > 1:
            values = values * keep[:, blocks].repeat_interleave(BLOCK, dim=-1)
        return values, blocks


def block_count(ratio: float, blocks: int) -> int:
    """Number of compensated blocks: as `Recipe.rac_blocks`."""
    return math.ceil(ratio * blocks - 1e-9)


class InputCache:
    """Remembers the last quantised input: q/k/v and gate/up multiply the same rows one after the other."""

    def __init__(self, granularity: Any) -> None:
        self.granularity = granularity
        self._key: tuple[Any, ...] | None = None
        self._held: tuple[Tensor, QuantizedRows] | None = None  # the tensor is held so that its address stays its own

    def get(self, x: Tensor, name: str, site_index: int) -> QuantizedRows:
        key = (x.data_ptr(), x._version, tuple(x.shape))
        if key != self._key or self._held is None:
            self._held, self._key = (x, QuantizedRows(x, self.granularity, name, site_index)), key
        rows = self._held[1]
        rows.site_index = site_index
        return rows

    def clear(self) -> None:
        self._key = self._held = None
