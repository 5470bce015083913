"""Products through vLLM's and FlashInfer's own NVFP4 GEMMs, on the K-augmented operand of RAC.

What those GEMMs take (read in vLLM 0.26 and 0.31 and FlashInfer 0.6.14; no FP4 tensor core has run this module):
packed E2M1 codes, even K in the low nibble; E4M3 block scales in the 128x4 layout, rows padded to 128 and blocks to 4;
one float32 alpha. They give cast(fl(acc * alpha)) in bfloat16 or float16.
    a = [Q(X), Q(R), 0]    b = [W, W_sel, 0]    K' = K + 16 S, rounded up to 64: one atom of scales
so the columns that RAC repeats are stored a second time, behind W. They are written in place, at a refit, when the
list of blocks changes, or (scope `batch`) at every call: CUDA graphs go on seeing one storage.
Grouped: rows sorted by expert; the activation scales of each expert start on a tile of 128 rows of their own, and the
weight scales of one expert follow those of the other without padding, so N must be a multiple of 128.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F

from quads.emulation import layout
from quads.emulation.quantizers import BLOCK
from quads.kernels.prepack import NativeWeight, Quantized

CODES, SCALES = "_augmented_codes", "_augmented_scales"
ATOM, TILE = 64, layout.LAYOUT_128X4.rows  # columns of one atom of scales, and its rows
_ATOM_BLOCKS = ATOM // BLOCK
Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Fp4Weight:
    """[W, W_sel, 0] of one weight, or of all experts, and the GEMM that multiplies by it.

    codes uint8 [experts, N, K'/2], scales E4M3 bytes uint8 [experts, N to 128, K'/16] in the 128x4 layout, outer
    float32 [experts]. `k` is K without the repeated columns.
    """

    codes: Tensor
    scales: Tensor
    outer: Tensor
    k: int
    run: Run

    def gather(self, blocks: Tensor) -> None:
        """Make W_sel the K blocks `blocks` (int [S]) of W, in place and without waiting for the device."""
        first, blocks = self.k // BLOCK, blocks.long()
        behind = torch.arange(first, first + blocks.numel(), device=blocks.device)
        words = self.codes.view(torch.int64)  # the 16 codes of a block are 8 bytes
        words[..., first : first + blocks.numel()] = words[..., : self.k // BLOCK].index_select(-1, blocks)
        atoms = _atoms(self.scales)
        atoms[_columns(behind)] = atoms[_columns(blocks)]


def width(k: int, extra: int) -> int:
    """K' of a K = `k` product with `extra` repeated blocks."""
    return -(-(k + BLOCK * extra) // ATOM) * ATOM


def augmented(weight: NativeWeight, extra: int) -> dict[str, Tensor]:
    """Storages of [W, 0] with room for `extra` blocks, by suffix; none where W can be multiplied as it lies."""
    columns = width(weight.k, extra)
    if columns == weight.k:
        return {}
    codes = F.pad(weight.codes, (0, (columns - weight.k) // 2))
    own = _atoms(_scales_of(weight))
    scales = F.pad(own, (0, 0, 0, 0, 0, 0, 0, columns // ATOM - own.shape[2]))
    return {CODES: codes, SCALES: scales.reshape(weight.experts, -1, columns // BLOCK)}


def weight_of(layer: Module, name: str, native: NativeWeight, run: Run) -> Fp4Weight:
    """The operand of weight `name`: views of `layer`'s parameters, or of `native` where nothing is added to it."""
    codes, scales = (layer._parameters.get(name + suffix) for suffix in (CODES, SCALES))
    outer = native.outer if native.outer.ndim == 1 else native.outer[:, 0]
    if codes is None or scales is None:
        return Fp4Weight(native.codes, _scales_of(native), outer, native.k, run)
    return Fp4Weight(codes.data, scales.data, outer, native.k, run)


def check_one_scale(native: NativeWeight, label: str) -> None:
    """ValueError where gate and up of `label` have different outer scales: the GEMM takes one alpha an expert."""
    if native.outer.ndim == 2 and not bool((native.outer == native.outer[:, :1]).all()):
        raise ValueError(f"{label}: gate and up have different outer scales, and vLLM's GEMM takes one an expert")


def matmul(q: Quantized, weight: Fp4Weight, out_dtype: torch.dtype) -> Tensor:
    """Rows `q` ([M, K + 16 S], one outer scale) times the only weight: [M, N] in bfloat16 or float16."""
    alpha = _one(q.outer) * weight.outer
    if q.packed.shape[0] == 0:
        return q.packed.new_empty((0, weight.codes.shape[1]), dtype=out_dtype)
    codes, scales = _wide(q.packed, weight.codes), layout.swizzle(_wide(q.scales, weight.scales))
    return weight.run(codes, weight.codes[0], _e4m3(scales), _e4m3(weight.scales[0]), alpha.reshape(1), out_dtype)


def grouped_matmul(q: Quantized, weight: Fp4Weight, ends: Tensor) -> Tensor:
    """Rows `q`, sorted by expert and ending at `ends` (int32 [experts]): [M, N] bfloat16, 0 past the last end."""
    experts, n = weight.codes.shape[:2]
    out = torch.zeros((q.packed.shape[0], n), dtype=torch.bfloat16, device=q.packed.device)
    if out.shape[0] == 0:
        return out
    alphas = _one(q.outer) * weight.outer
    counts, starts, tile_starts, place = _places(ends, out.shape[0])
    spread = torch.zeros((_room(out.shape[0], experts), weight.scales.shape[2]), dtype=torch.uint8, device=out.device)
    spread.index_copy_(0, place, _wide(q.scales, weight.scales))
    sizes = torch.stack([counts, torch.full_like(counts, n), torch.full_like(counts, 2 * weight.codes.shape[2])], dim=1)
    operands = (_wide(q.packed, weight.codes), weight.codes, _e4m3(layout.swizzle(spread)), _e4m3(weight.scales))
    weight.run(out, *operands, alphas, sizes.int(), starts.int(), tile_starts.int())
    return out


def _places(ends: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row counts and first rows of the experts, the first rows of their scales, and the place of each row's scales.

    Rows past the last end go to one tile behind all others, which no expert reads.
    """
    ends = ends.long()
    starts = F.pad(ends[:-1], (1, 0))
    counts = ends - starts
    tiles = (counts + TILE - 1) // TILE
    tile_starts = (tiles.cumsum(0) - tiles) * TILE
    row = torch.arange(rows, device=ends.device)
    owner = torch.searchsorted(ends, row, right=True)
    mine = owner.clamp(max=len(ends) - 1)
    spare = _room(rows, len(ends)) - TILE + row % TILE
    return counts, starts, tile_starts, torch.where(owner < len(ends), tile_starts[mine] + row - starts[mine], spare)


def _room(rows: int, experts: int) -> int:
    """Rows that the scales of `rows` take at most, in whole tiles an expert, and one tile more."""
    return (rows + (TILE - 1) * min(rows, experts)) // TILE * TILE + TILE


def _one(outer: Tensor) -> Tensor:
    if outer.numel() != 1:
        raise ValueError(f"outer scale of shape {tuple(outer.shape)}: vLLM's GEMM multiplies all rows by one alpha")
    return outer.reshape(())


def _wide(rows: Tensor, like: Tensor) -> Tensor:
    """`rows` with zero columns appended until they are as wide as `like`."""
    return F.pad(rows, (0, like.shape[-1] - rows.shape[-1])).contiguous()


def _scales_of(weight: NativeWeight) -> Tensor:
    return weight.scales.view(weight.experts, -(-weight.n // TILE) * TILE, -1)


def _atoms(scales: Tensor) -> Tensor:
    """Bytes [experts, rows, blocks] in the 128x4 layout as [experts, tile, atom, 32, 4, block of the atom]."""
    return scales.view(scales.shape[0], -1, scales.shape[2] // _ATOM_BLOCKS, 32, 4, _ATOM_BLOCKS)


def _columns(blocks: Tensor) -> tuple[slice, slice, Tensor, slice, slice, Tensor]:
    """The index of K blocks `blocks` in `_atoms`."""
    return slice(None), slice(None), blocks // _ATOM_BLOCKS, slice(None), slice(None), blocks % _ATOM_BLOCKS


def _e4m3(scales: Tensor) -> Tensor:
    return scales.view(torch.float8_e4m3fn)
