"""What our products cost on a chip, dense and routed, in the way that `quads.kernels` takes: their kernels as `Work`.

On Hopper both operands are decoded to bfloat16, in registers for few rows (instructions counted in the compiled loops),
once and for all for many; elsewhere FP4 tensor cores multiply (tiles, stages and instructions of the compiled Triton
product). Ways, plans and widths of blocks are asked of the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil

import numpy as np

from quads.bench import compiled, counts
from quads.bench.specs import Chip
from quads.bench.work import Work

ISSUED = 0.52  # of the issue slots, by ncu in the H200's decode kernel (kernels/NOTES-gemm.md)
MMA_SYNC = 0.63  # of the rate of wgmma, on Hopper (likewise)
Works = tuple[Work, ...]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Even routing of `tokens` to `top_k` of `experts` each."""

    tokens: int
    experts: int
    top_k: int

    @property
    def pairs(self) -> int:
        """Routed rows."""
        return self.tokens * self.top_k

    @property
    def used(self) -> float:
        """Experts that some token needs, expected."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** self.tokens)

    def blocks(self, width: int) -> float:
        """Blocks of `width` rows of one expert, expected: the rows of an expert are binomial."""
        return _blocks(self, width)


@dataclass(frozen=True, kw_only=True)
class Product:
    """Weights [N, K], RAC's `extra` columns, and the bytes that move where nothing is decoded to memory.

    swiglu: gate and up are multiplied in the epilogue, so that half of N is stored.
    """

    n: int
    k: int
    extra: int
    moved: float
    swiglu: bool = False


def dense(m: int, p: Product, chip: Chip) -> Works:
    """y [M, N] = x W^T."""
    if chip.native_fp4:
        return (_native([(m, 1.0)], p, chip),)
    way = _dense_way(m, p.extra > 0)
    if way != "prefill":
        return (_decoded(way, [(m, 1.0)], p),)
    passes = (Work(bytes=rows * (p.k + p.extra) * (2 + counts.NVFP4)) for rows in (m, p.n))
    width = p.k + p.extra
    multiplied = Work(bytes=2.0 * (m * width + p.n * width + m * p.n), flops=2.0 * m * p.n * width, numerics="bf16")
    return (*passes, multiplied)


def routed(routing: Routing, rows: int, p: Product, chip: Chip) -> Works:
    """Each routed row times its expert's weight; rows: of activations, which several experts may read."""
    if chip.native_fp4:
        row = compiled.product("native", chip.target, 1, residual=False, grouped=True)
        width = int(row["tokens"])
        return (_native([(width, routing.blocks(width))], p, chip, grouped=True),)
    way, width = _routed_way(routing, p)
    if way == "prefill":
        return _expanded(routing, rows, width, p)
    blocks = [(width, routing.blocks(width))]
    return (_shared(*blocks[0], p) if way == "grouped" else _decoded(way, blocks, p, grouped=True),)


def goes_through_memory(routing: Routing, p: Product, chip: Chip) -> bool:
    """Whether operands and results of the routed product are too large for the caches: a prompt's, on Hopper."""
    return not chip.native_fp4 and _routed_way(routing, p)[0] == "prefill"


def _dense_way(m: int, residual: bool) -> str:
    from quads.kernels.gemm import hopper_way

    return hopper_way(m, residual=residual)


def _routed_way(routing: Routing, p: Product) -> tuple[str, int]:
    """The way that quads.kernels.moe takes on Hopper, and the rows of its blocks."""
    from quads.kernels import moe

    weight = compiled.shape_of(routing.experts, p.n, p.k)
    return moe.choose(routing.pairs, weight), moe.slot_width(routing.pairs, weight)


def _decoded(way: str, rows: list[tuple[int, float]], p: Product, *, grouped: bool = False) -> Work:
    """Decoding both operands in registers; rows: (activation rows of a weight, how many such weights).

    A step of K skips the residual where none of its blocks is repeated.
    """
    issued = flops = 0.0
    for m, weights in rows:
        plain, rac = (compiled.product(way, "sm_90a", m, residual=r, grouped=grouped) for r in (False, True))
        steps = ceil(p.n / plain["rows"]) * ceil(p.k / plain["k"]) * ceil(m / plain["tokens"]) * plain["warps"]
        more = rac["instructions_a_step"] - plain["instructions_a_step"]
        repeated = 1 - (1 - p.extra / p.k) ** (plain["k"] / 16)
        issued += weights * steps * (plain["instructions_a_step"] + repeated * more)
        flops += weights * 2.0 * m * p.n * (p.k + p.extra)
    reached = 1.0 if way == "wide" else MMA_SYNC
    return Work(bytes=p.moved, flops=flops, reached=reached, instructions=issued, issued=ISSUED)


def _shared(width: int, blocks: float, p: Product) -> Work:
    """Blocks of few rows whose warps decode activations for each other; a weight's repeated blocks stand together."""
    from quads.kernels import moe

    warps = moe.rows_plan(width, p.k).row_warps
    row = compiled.product("grouped", "sm_90a", width, residual=p.extra > 0, grouped=True, warps=warps)
    again = ceil(p.extra / row["k"])
    chunks = ceil(p.k / row["k"]) - again
    each = chunks * row["instructions_a_step"] + again * (row["repeated"] or 0)
    return Work(
        bytes=p.moved, flops=blocks * 2.0 * width * p.n * (p.k + p.extra), reached=MMA_SYNC,
        instructions=blocks * ceil(p.n / row["rows"]) * warps * each, issued=ISSUED,
    )  # fmt: skip


def _expanded(routing: Routing, rows: int, width: int, p: Product) -> Works:
    """Rows in the order of their experts and all experts decoded to bfloat16, then one product.

    A block of rows at most half full takes half the work.
    """
    from quads.kernels.gemm_details import prefill

    k, blocks = p.k + p.extra, routing.blocks(width)
    slots, stored = width * blocks, routing.pairs * p.n / (2 if p.swiglu else 1)
    x = Work(bytes=rows * k * counts.NVFP4 + 2.0 * slots * k)
    w = Work(bytes=routing.used * p.n * (p.k * counts.NVFP4 + 2.0 * k))
    multiplied = Work(
        bytes=2.0 * (slots * k + routing.used * p.n * k + stored),
        flops=2.0 * (width // 2) * routing.blocks(width // 2) * p.n * k,
        blocks=blocks * ceil(p.n / prefill.Tile().columns),
    )  # fmt: skip
    return x, w, multiplied


def _native(rows: list[tuple[int, float]], p: Product, chip: Chip, *, grouped: bool = False) -> Work:
    """The Triton product: tiles of the compiled kernel, its loop over K and, with RAC, over the repeated blocks."""
    issued = flops = blocks = requested = in_flight = 0.0
    for m, weights in rows:
        row = compiled.product("native", chip.target, m, residual=p.extra > 0, grouped=grouped)
        tiles = weights * ceil(p.n / row["rows"]) * ceil(m / row["tokens"])
        steps, again = ceil(p.k / row["k"]), ceil(p.extra / row["k"])
        step_bytes = (row["rows"] + row["tokens"]) * row["k"] * counts.NVFP4
        blocks += tiles
        issued += tiles * row["warps"] * (steps * row["instructions_a_step"] + again * (row["repeated"] or 0))
        flops += tiles * 2.0 * row["tokens"] * row["rows"] * row["k"] * (steps + again)
        requested += tiles * step_bytes * (steps + again)
        in_flight = row["stages"] * step_bytes
    return Work(
        bytes=p.moved, flops=flops, numerics="nvfp4", instructions=issued, blocks=blocks, requested=requested,
        in_flight=in_flight,
    )  # fmt: skip


@cache
def _blocks(routing: Routing, width: int) -> float:
    from scipy.stats import binom

    rows = np.arange(1, routing.tokens + 1)
    chance = binom.pmf(rows, routing.tokens, routing.top_k / routing.experts)
    return routing.experts * float(np.sum(chance * np.ceil(rows / width)))
