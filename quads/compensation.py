"""Residual activation compensation for one layer of a rollout: who shares a block selection, and the augmented GEMM.

Scopes: `batch` one selection for all rows of the call; `tile` one per 128 rows of one expert; `token` one per row;
`static` the batch selection of the first call, kept until refreshed; `random` a fixed draw (the control arm); `all`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quads.emulation import gemm, quantizers, residual
from quads.emulation.quantizers import BLOCK, NVFP4Tensor
from quads.recipes import Recipe

TILE_ROWS = 128

Part = tuple[slice, int, Tensor | None, Tensor | None]  # rows, expert, blocks, keep


class BlockSelector:
    """Chooses the 16-channel blocks of one layer whose residual is compensated."""

    def __init__(self, recipe: Recipe, k: int, seed: int) -> None:
        self.recipe, self.count, self.total, self.seed = recipe, recipe.rac_blocks(k), k // BLOCK, seed
        self._kept: Tensor | None = None
        self._age = 0

    def end_of_rollout(self) -> None:
        """Count one rollout; a static or random selection older than `rac_refresh` rollouts is dropped."""
        self._age += 1
        if self._age >= self.recipe.rac_refresh:
            self._kept, self._age, self.seed = None, 0, self.seed + 1_000_003

    def select(self, x: Tensor, q: NVFP4Tensor, groups: list[slice]) -> Iterator[Part]:
        """Row ranges, each with its expert, its blocks (int64, ascending; None: no RAC) and a row mask of blocks.

        x [M, K], q its quantisation, `groups` the rows of each expert. The mask (bool [rows, blocks]) is there only
        where rows of one range choose differently (`token`).
        """
        filled = [(rows, expert) for expert, rows in enumerate(groups) if rows.stop > rows.start]
        if self.count == 0:
            yield from ((rows, expert, None, None) for rows, expert in filled)
        elif self.recipe.rac_scope == "token":
            keep = self._token_mask(x, q)
            every = torch.arange(self.total, device=x.device)
            yield from ((rows, expert, every, keep[rows]) for rows, expert in filled)
        elif self.recipe.rac_scope == "tile":
            for rows, expert in filled:
                for tile in _tiles(rows):
                    yield tile, expert, self._top(x[tile], part(q, tile)), None
        else:
            blocks = self._shared(x, q)
            yield from ((rows, expert, blocks, None) for rows, expert in filled)

    def row_mask(self, x: Tensor, outer: Tensor, ends: Tensor) -> Tensor:
        """Selected blocks of each row (bool [M, K/16]) in the scopes `token` and `tile`; x's own outer scale given."""
        q = quantizers.quantize(x, outer)
        return self._token_mask(x, q) if self.recipe.rac_scope == "token" else self._tile_mask(x, q, ends)

    def kept(self, x: Tensor) -> Tensor:
        """The selection (int64, ascending) of the scopes `static` and `random`, made by the first call."""
        if self._kept is None:
            granularity = self.recipe.activation_outer
            q = quantizers.quantize(x, granularity=granularity)  # type: ignore[arg-type]
            return self._shared(x, q)
        return self._kept

    def _shared(self, x: Tensor, q: NVFP4Tensor) -> Tensor:
        scope = self.recipe.rac_scope
        if scope == "all":
            return torch.arange(self.total, device=x.device)
        if scope == "batch":
            return self._top(x, q)
        if self._kept is None:
            self._kept = self._top(x, q) if scope == "static" else self._draw().to(x.device)
        return self._kept

    def _draw(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(self.total, generator=generator)[: self.count].sort().values

    def _top(self, x: Tensor, q: NVFP4Tensor) -> Tensor:
        scores = residual.block_scores(residual.residual(x, q), q.outer)
        return residual.top_blocks(scores.sum(dim=0), self.count)

    def _token_mask(self, x: Tensor, q: NVFP4Tensor) -> Tensor:
        scores = residual.block_scores(residual.residual(x, q), q.outer.expand(x.shape[0], 1), shared=False)
        keep = torch.zeros_like(scores, dtype=torch.bool)
        return keep.scatter(-1, residual.top_blocks(scores, self.count), True)

    def _tile_mask(self, x: Tensor, q: NVFP4Tensor, ends: Tensor) -> Tensor:
        """Tile by tile what `_top` gives, for all tiles at once and without waiting for the device."""
        tile, most = _tile_of_row(ends, x.shape[0])
        largest = torch.zeros(most, device=x.device)
        largest = largest.scatter_reduce(0, tile, q.outer.expand(x.shape[0], 1).squeeze(-1), "amax")
        rows = residual.block_scores(residual.residual(x, q), largest[tile].unsqueeze(-1), shared=False)
        scores = torch.zeros(most, self.total, dtype=torch.int64, device=x.device).index_add(0, tile, rows)
        keep = torch.zeros_like(scores, dtype=torch.bool)
        return keep.scatter(-1, residual.top_blocks(scores, self.count), True)[tile]


def augment(
    x: Tensor, q: NVFP4Tensor, weight: NVFP4Tensor, blocks: Tensor | None, keep: Tensor | None
) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    """([Q(X), Q(R_S)], [Q(W), Q(W)_S]): the extra weight columns are the same codes and block scales."""
    if blocks is None:
        return q, weight
    r = residual.quantize_residual(x, q, blocks)
    if keep is not None:
        wide = keep.repeat_interleave(BLOCK, dim=-1)
        r = NVFP4Tensor(r.codes * wide, r.scales * keep, r.outer)
    return gemm.concat_k(q, r), gemm.concat_k(weight, gemm.select_blocks(weight, blocks))


def _tiles(rows: slice) -> list[slice]:
    return [slice(s, min(s + TILE_ROWS, rows.stop)) for s in range(rows.start, rows.stop, TILE_ROWS)]


def _tile_of_row(ends: Tensor, count: int) -> tuple[Tensor, int]:
    """Number of the tile (int64 [rows]) that each of `count` rows is in, and a bound on how many tiles there are."""
    rows, ends = torch.arange(count, device=ends.device), ends.long()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    tiles = (ends - starts + TILE_ROWS - 1) // TILE_ROWS
    expert = torch.searchsorted(ends, rows, right=True)
    first = tiles.cumsum(0) - tiles
    return first[expert] + (rows - starts[expert]) // TILE_ROWS, count // TILE_ROWS + len(ends)


def part(q: NVFP4Tensor, index: int | slice) -> NVFP4Tensor:
    """Rows, or one expert, of a quantised tensor; an outer scale per tensor is everybody's."""
    return NVFP4Tensor(q.codes[index], q.scales[index], q.outer[index] if q.outer.ndim else q.outer)
