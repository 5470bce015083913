"""The order in which the Hopper kernels walk K: what FP32 results depend on in their last bits.

A chunk is four scale blocks. Instruction m of a chunk multiplies 16 elements, four of each block, one block for each
lane of a quad; within an instruction the order does not matter. A slice (a warp, or a warpgroup set) takes every
`slices`-th run of chunks; the slices' sums are added in ascending order, round to nearest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

# Elements of a block that instruction m multiplies: nibbles P and P + 4 of a 32-bit word lie in one register.
_ELEMENTS = ((0, 4, 1, 5), (2, 6, 3, 7), (8, 12, 9, 13), (10, 14, 11, 15))

Kernel = Literal["decode", "wide", "grouped"]


def columns(
    k_blocks: int, repeated: list[int], *, run: int = 1, slices: int = 1, kernel: Kernel = "decode"
) -> list[list[int]]:
    """Columns of the augmented operand (-1: a zero) in the order each slice multiplies them, 16 an instruction.

    repeated: the K blocks that the columns past 16 k_blocks repeat. In wide.cu the residual follows each chunk, else
    each instruction; grouped.cu walks the repeated blocks first, then the others.
    """
    others = [b for b in range(k_blocks) if b not in repeated]
    walk = [*repeated, *others] if kernel == "grouped" else list(range(k_blocks))
    walk += [-1] * (-k_blocks % 4)
    chunks = len(walk) // 4
    runs = -(-chunks // run)
    orders: list[list[int]] = []
    for s in range(slices):
        mine = [r * run + c for r in range(s, runs, slices) for c in range(run) if r * run + c < chunks]
        parts = [walk[4 * chunk : 4 * chunk + 4] for chunk in mine]
        orders.append([column for part in parts for column in _chunk(part, k_blocks, repeated, kernel)])
    return orders


def _chunk(main: list[int], k_blocks: int, repeated: list[int], kernel: Kernel) -> Iterator[int]:
    rest = [k_blocks + repeated.index(b) if b in repeated else -1 for b in main]
    sets = [main, rest] if repeated else [main]
    steps = [(s, m) for s in sets for m in range(4)] if kernel == "wide" else [(s, m) for m in range(4) for s in sets]
    for blocks, m in steps:
        if any(b >= 0 for b in blocks):
            yield from (16 * b + e if b >= 0 else -1 for b in blocks for e in _ELEMENTS[m])
