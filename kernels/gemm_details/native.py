"""Launches of the Triton product (native_jit.py): tile shapes by chip and number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quads.emulation.quantizers import BLOCK
from quads.kernels import support
from quads.kernels.gemm_details.grouping import Grouping
from quads.kernels.prepack import NativeWeight, Quantized


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One program's share: tokens x rows of the weight, K in steps of `blocks` scale blocks.

    swap: weight first; tma: weight and its scales through TMA; specialize: warps that load and warps that multiply,
    where no block is repeated (with RAC's second loop it spills).
    """

    tokens: int
    rows: int
    blocks: int
    swap: bool
    native: bool
    tma: bool
    warps: int
    stages: int
    specialize: bool = False

    def constants(self) -> dict[str, int | bool]:
        return {
            "TOKENS": self.tokens, "ROWS": self.rows, "BLOCKS": self.blocks,
            "SWAP": self.swap, "NATIVE": self.native, "TMA": self.tma,
        }  # fmt: skip


# Tensor cores with FP4: few tokens, many tokens. sm_120 has 99 KiB of shared memory and no tensor memory.
_TILES: dict[str, tuple[Tile, Tile]] = {
    "sm_100": (
        Tile(tokens=32, rows=128, blocks=16, swap=True, native=True, tma=True, warps=4, stages=4, specialize=True),
        Tile(tokens=128, rows=128, blocks=16, swap=False, native=True, tma=True, warps=8, stages=4, specialize=True),
    ),
    "sm_120": (
        Tile(tokens=16, rows=128, blocks=16, swap=True, native=True, tma=False, warps=4, stages=2),
        Tile(tokens=128, rows=128, blocks=8, swap=False, native=True, tma=False, warps=8, stages=3),
    ),
    "portable": (
        Tile(tokens=16, rows=32, blocks=4, swap=True, native=False, tma=False, warps=4, stages=1),
        Tile(tokens=32, rows=32, blocks=4, swap=False, native=False, tma=False, warps=4, stages=1),
    ),
}
FEW_TOKENS = 64


def tile_for(family: str, tokens: int) -> Tile:
    """The tile of a chip family for `tokens` rows of activations."""
    few, many = _TILES[family]
    return few if tokens <= FEW_TOKENS else many


def family() -> str:
    """Row of the tile table for the current device; "portable" in the interpreter and without FP4 tensor cores."""
    if support.interpreting() or support.missing_blackwell():
        return "portable"
    found = support.capability()
    return "sm_100" if found is not None and found[0] == 10 else "sm_120"


def product(
    a: Quantized,
    b: NativeWeight,
    tile: Tile,
    *,
    blocks: Tensor | None = None,
    grouping: Grouping | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The product of `a` with one weight, or with the weight of each token block of `grouping`: [M, N] or [rows, N]."""
    import triton

    from quads.kernels.gemm_details.native_jit import scaled_product

    rows = a.packed.shape[0]
    token_blocks = -(-rows // tile.tokens) if grouping is None else grouping.groups.numel()
    out = torch.empty((grouping.rows_out if grouping else rows, b.n), dtype=out_dtype, device=a.packed.device)
    tiles = token_blocks * -(-b.n // tile.rows)
    if tiles == 0:
        return out
    tile = replace(tile, tma=tile.tma and b.k % 32 == 0)  # TMA wants rows of a multiple of 16 bytes
    if tile.tma:
        triton.set_allocator(_scratch)
    extra = 0 if blocks is None else blocks.shape[-1]
    persistent = not support.interpreting()
    scaled_product[(min(tiles, _programs(a.packed.device)) if persistent else tiles,)](
        a.packed, a.scales, a.outer, b.codes, b.scales, b.outer,
        blocks, out, grouping.slots if grouping else None, grouping.groups if grouping else None,
        rows, b.n, b.k // BLOCK, extra, token_blocks, b.experts, grouping.share if grouping else 1,
        **tile.constants(), **steps(tile, b.k // BLOCK, extra), PERSISTENT=persistent,
        SPECIALIZE=tile.specialize and extra == 0,
        GROUPED=grouping is not None, SELECTED=blocks is not None and blocks.ndim == 2,
        HALVES=b.outer.ndim == 2, OUTER_PER_ROW=a.outer.numel() > 1,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def steps(tile: Tile, k_blocks: int, extra: int) -> dict[str, int]:
    """Trip counts of the loops over K and over the repeated blocks."""
    return {"STEPS": -(-k_blocks // tile.blocks), "EXTRA_STEPS": -(-extra // tile.blocks)}


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 30
    return torch.cuda.get_device_properties(device).multi_processor_count * 2


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
