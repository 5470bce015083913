"""Quantise with residual activation compensation: the K-augmented operand of one W4A4 GEMM.

Row m of the result is [Q(x_m), Q(R_m,S)]: K/16 blocks of codes, then the residual's codes of the selected blocks, all
with x's outer scale. The weight is not touched: the GEMM walks the K blocks 0 .. K/16 - 1 and then the list of
selected blocks. Selection rule, scores and ties are those of `quads.emulation.residual`, and the bytes are its bytes.

One pass over x where the list is known beforehand (static, random, all) or belongs to one row (token); two where rows
share a list that depends on them (batch, tile): the first pass writes the main codes and adds up the scores. A known
list at few rows takes one launch, per-token outer scales included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quads.kernels import support
from quads.kernels.quantize import BLOCK, Granularity, as_rows, empty_outer, outer_or_amax

Scope = Literal["token", "tile", "batch", "static", "random", "all"]
TILE_ROWS = 128
_LANES = 128  # blocks of a program, one for each of four warps' threads (measured best: NOTES-quantize.md)
_BLOCKS_A_THREAD = 1
_ROWS_A_PROGRAM = 16  # of the pass that adds up scores: one atomic for each block and so many rows
_WIDEST_ROW = 1024  # blocks of a row that one program keeps in registers, residual included
_FEW_ROWS = 1024  # up to which one launch beats a pass for the outer scales and one for the codes


@dataclass(frozen=True)
class RacOperand:
    """Packed codes uint8 [M, (K+R)/2], scales E4M3 bytes uint8 [M, (K+R)/16], outer float32 [] or [M, 1].

    blocks: selected blocks, int32, ascending: [R/16], or a list for each row ([M, R/16]) or tile ([tiles, R/16]).
    """

    packed: Tensor
    scales: Tensor
    outer: Tensor
    blocks: Tensor


def quantize_rac(
    x: Tensor,
    blocks: int,
    scope: Scope = "batch",
    outer: Tensor | None = None,
    *,
    granularity: Granularity = "tensor",
    static_blocks: Tensor | None = None,
    static_ranks: Tensor | None = None,
    tile_rows: int = TILE_ROWS,
    seed: int = 0,
) -> RacOperand:
    """Quantise `x` [..., K] and compensate `blocks` of its K/16 blocks (R = 16 * blocks more columns).

    static_blocks: int32 [blocks], ascending, for scope `static`; static_ranks: `ranks` of it, where it is known
    already. tile_rows: rows that share a list in scope `tile`.
    seed: for scope `random`; the draw is torch.randperm of a CPU generator, the same for every call.
    Raises ValueError on a bad shape, count or list, RuntimeError where no kernel can run.
    """
    rows = as_rows(x)
    total = rows.shape[1] // BLOCK
    _check(blocks, total, scope, static_blocks, tile_rows)
    support.check_launch(x, "quantize_rac")
    known = scope in ("static", "random", "all")
    in_pass = known and outer is None and granularity == "token" and total <= _WIDEST_ROW and rows.shape[0] <= _FEW_ROWS
    scale = empty_outer(rows, granularity) if in_pass else outer_or_amax(rows, outer, granularity)
    columns = total + blocks
    packed = torch.empty(rows.shape[0], columns * BLOCK // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows.shape[0], columns, dtype=torch.uint8, device=x.device)
    task = _Task(rows, packed, scales, scale, blocks, granularity == "token")
    if scope == "token" and total <= _WIDEST_ROW:
        lists = task.by_token()
    elif scope in ("token", "tile", "batch"):
        lists = task.by_score({"token": 1, "tile": tile_rows, "batch": max(1, rows.shape[0])}[scope])
    else:
        listed = _known_list(scope, blocks, total, static_blocks, seed, x.device)
        lists = task.by_row(listed, static_ranks) if in_pass else task.by_list(listed)
    return RacOperand(packed, scales, scale, lists[0] if scope == "batch" else lists)


def _check(blocks: int, total: int, scope: str, static_blocks: Tensor | None, tile_rows: int) -> None:
    if scope not in ("token", "tile", "batch", "static", "random", "all"):
        raise ValueError(f"scope '{scope}' is unknown (known: token, tile, batch, static, random, all)")
    if not 0 <= blocks <= total:
        raise ValueError(f"blocks = {blocks}: K holds {total} blocks of {BLOCK}")
    if scope == "all" and blocks != total:
        raise ValueError(f"blocks = {blocks}: scope 'all' compensates all {total}")
    if (static_blocks is None) == (scope == "static"):
        raise ValueError("static_blocks goes with scope 'static', and only with it")
    if static_blocks is not None and (static_blocks.shape != (blocks,) or static_blocks.dtype != torch.int32):
        raise ValueError(f"static_blocks is {static_blocks.dtype} {tuple(static_blocks.shape)}, not int32 ({blocks},)")
    if tile_rows < 1:
        raise ValueError(f"tile_rows = {tile_rows}: must be positive")


def ranks(blocks: Tensor, total: int) -> Tensor:
    """int32 [total]: the place of each block in the list `blocks`, -1 where it is not listed."""
    places = torch.arange(blocks.numel(), dtype=torch.int32, device=blocks.device)
    return torch.full((total,), -1, dtype=torch.int32, device=blocks.device).scatter(0, blocks.long(), places)


def _known_list(
    scope: str, blocks: int, total: int, static_blocks: Tensor | None, seed: int, device: torch.device
) -> Tensor:
    if static_blocks is not None:
        return static_blocks.to(device)
    drawn = torch.arange(total)
    if scope == "random":
        drawn = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:blocks].sort().values
    return drawn.to(device, torch.int32)


@dataclass(frozen=True)
class _Task:
    """Operands of one call; each method fills them and returns the block lists."""

    rows: Tensor
    packed: Tensor
    scales: Tensor
    outer: Tensor
    count: int
    token: bool

    @property
    def total(self) -> int:
        return self.rows.shape[1] // BLOCK

    @property
    def stride(self) -> int:
        return self.rows.stride(0) * self.rows.element_size() // 4

    @property
    def words(self) -> Tensor:
        return self.packed.view(torch.int32)

    def by_token(self) -> Tensor:
        """A list for each row: [M, count]."""
        from quads.kernels.quantize_details.compensate_jit import token_kernel

        m, lanes = self.rows.shape[0], _power(self.total)
        lists = torch.empty(m, self.count, dtype=torch.int32, device=self.rows.device)
        if m:
            token_kernel[(m,)](
                self.rows, self.words, self.scales, self.outer, lists, self.total, self.count,
                self.scales.shape[1], self.stride, B=lanes, TOKEN=self.token, NATIVE=support.native_level(),
                num_warps=max(1, lanes // 128), enable_fp_fusion=False,
            )  # fmt: skip
        return lists

    def by_score(self, tile_rows: int) -> Tensor:
        """A list for each tile of rows: [tiles, count]. Two passes over the selected part of x, one over the rest."""
        from quads.kernels.quantize_details.compensate_jit import scores_kernel, select_kernel

        m = self.rows.shape[0]
        tiles = max(1, -(-m // tile_rows))
        scores = torch.zeros(tiles, self.total, dtype=torch.int64, device=self.rows.device)
        lists = torch.empty(tiles, self.count, dtype=torch.int32, device=self.rows.device)
        if m:
            lanes = min(_power(self.total), _LANES)
            steps = min(_ROWS_A_PROGRAM, _power(min(tile_rows, m)))
            grid = (-(-self.total // lanes), -(-min(tile_rows, m) // steps), tiles)
            scores_kernel[grid](
                self.rows, self.words, self.scales, self.outer, _largest(self.outer, m, tile_rows), scores, m,
                self.total, self.scales.shape[1], self.stride, tile_rows, B=lanes, STEPS=steps,
                TOKEN=self.token, NATIVE=support.native_level(), num_warps=_warps(lanes),
                enable_fp_fusion=False,
            )  # fmt: skip
        if self.count:
            select_kernel[(tiles,)](scores, lists, self.total, self.count, B=_power(self.total), num_warps=8)
            self._listed(lists, tile_rows, self.count, main=False)
        return lists

    def by_row(self, listed: Tensor, places: Tensor | None) -> Tensor:
        """The given list, [count], and the outer scale of each row, in one launch."""
        from quads.kernels.quantize_details.compensate_jit import listed_row_kernel

        m, lanes = self.rows.shape[0], _power(self.total)
        if m:
            listed_row_kernel[(m,)](
                self.rows, self.words, self.scales, self.outer,
                ranks(listed, self.total) if places is None else places, self.total, self.scales.shape[1],
                self.stride, B=lanes, NATIVE=support.native_level(), num_warps=_warps(lanes),
                enable_fp_fusion=False,
            )  # fmt: skip
        return listed

    def by_list(self, listed: Tensor) -> Tensor:
        """The given list, [count]. One pass."""
        from quads.kernels.quantize_details.compensate_jit import order_kernel

        order = torch.empty(self.total, dtype=torch.int32, device=self.rows.device)
        member = torch.zeros(self.total, dtype=torch.int32, device=self.rows.device)
        sizes = {"B": _power(self.total), "S": _power(max(1, self.count))}
        order_kernel[(1,)](listed, member, order, self.total, self.count, **sizes, num_warps=8)
        self._listed(order, max(1, self.rows.shape[0]), 0, main=True)
        return listed

    def _listed(self, order: Tensor, tile_rows: int, order_stride: int, *, main: bool) -> None:
        from quads.kernels.quantize_details.compensate_jit import listed_kernel

        m, rest = self.rows.shape[0], self.total - self.count if main else 0
        items = min(_power(max(self.count, rest)), _LANES)
        rows = 1 if tile_rows < _LANES // items else _LANES // items
        chunks = -(-self.count // items) + -(-rest // items)
        if m:
            listed_kernel[(-(-m // rows) * chunks,)](
                self.rows, self.words, self.scales, self.outer, order, m, self.total, self.count,
                self.scales.shape[1], self.stride, tile_rows, order_stride, ROWS=rows, ITEMS=items,
                TOKEN=self.token, MAIN=main, NATIVE=support.native_level(),
                num_warps=_warps(rows * items), enable_fp_fusion=False,
            )  # fmt: skip


def _largest(outer: Tensor, m: int, tile_rows: int) -> Tensor:
    """Largest outer scale of each tile of rows, float32 [tiles]."""
    tiles = -(-m // tile_rows)
    if outer.ndim == 0:
        return outer.expand(tiles).contiguous()
    if tiles == 1:
        return outer.amax().reshape(1)
    padded = torch.nn.functional.pad(outer.flatten(), (0, tiles * tile_rows - m))
    return padded.view(tiles, tile_rows).amax(dim=1)


def _warps(lanes: int) -> int:
    return max(1, lanes // (32 * _BLOCKS_A_THREAD))


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()
