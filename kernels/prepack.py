"""Weights in the order in which the kernels read them, written once per refit.

Hopper (gemm_details/decode.cu). For each tile of 64 rows and each block of 16 along K, 512 bytes of codes and 64 of
scales:
    codes  [i 4][g 8][h 2][8 bytes]   row = 16 i + 8 h + g of the tile; the 8 bytes are the row's 16 codes
    scales [g 8][i 4][h 2]
so that a lane of the tensor-core fragment reads 16 contiguous bytes, and a block that RAC repeats is contiguous too.
For SwiGLU (`interleave=True`) the two halves of N alternate: h = 0 is the gate's row 8 i + g of 32, h = 1 the up's.

Within each 16-bit half of a word the four codes' bits move so that decoding takes one or two operations:
    code 0: sign 15, magnitude 8..6;  1: sign 12, 5..3;  2: sign 14, 2..0;  3: sign 13, 11..9
Scales become E5M3 with bias 10: every E4M3 value is a normal number there, NaN is 0xFF. A zero scale has no code of
its own, so the magnitudes of its block become zero. Rows past N are zero.

Native (gemm_details/native_jit.py). Codes stay as they are; scales go to the 128x4 layout of cuBLASLt and CUTLASS,
the rows of each expert padded to whole tiles of 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quads.emulation.quantizers import BLOCK

TILE = 64
_MOVES = (  # mask within each 16-bit half, left shift
    (0x0008, 12),
    (0x0007, 6),
    (0x0080, 5),
    (0x0070, -1),
    (0x0800, 3),
    (0x0700, -8),
    (0x8000, -2),
    (0x7000, -3),
)


class Quantized(Protocol):
    """What a product takes: packed codes uint8 [..., K/2], E4M3 block scales uint8 [..., K/16], float32 outer scale."""

    @property
    def packed(self) -> Tensor: ...

    @property
    def scales(self) -> Tensor: ...

    @property
    def outer(self) -> Tensor: ...


@dataclass(frozen=True)
class HopperWeight:
    """One weight [N, K] or [experts, N, K] in decode order.

    codes uint8 [experts, tiles, K/16, 512], scales uint8 [experts, tiles, K/16, 64], outer float32 [experts] or, for
    an interleaved one, [experts, 2]. `n` and `k` are the shape before padding.
    """

    codes: Tensor
    scales: Tensor
    outer: Tensor
    n: int
    k: int
    interleaved: bool

    @property
    def experts(self) -> int:
        return self.codes.shape[0]


@dataclass(frozen=True)
class NativeWeight:
    """One weight for the Triton product: codes uint8 [experts, N, K/2], scales uint8 in the 128x4 layout.

    The float32 outer scale is [experts], or [experts, 2] where the halves of N (gate, up) have their own.
    """

    codes: Tensor
    scales: Tensor
    outer: Tensor

    @property
    def experts(self) -> int:
        return self.codes.shape[0]

    @property
    def n(self) -> int:
        return self.codes.shape[1]

    @property
    def k(self) -> int:
        return self.codes.shape[2] * 2


PreparedWeight = HopperWeight | NativeWeight


def prepare_native(b: Quantized, *, halves: bool = False, out: NativeWeight | None = None) -> NativeWeight:
    """`b` ([N, K] or [experts, N, K]) for the Triton product; into the storage of `out`, if given.

    The codes of `b` are kept, not copied, when `out` is None. `halves`: gate and up each have an outer scale.
    """
    packed, scales = _three_dimensional(b)
    rows, columns = scales.shape[1:]
    padded = torch.nn.functional.pad(scales, (0, -columns % 4, 0, -rows % 128))
    atoms = padded.unflatten(2, (-1, 4)).unflatten(1, (-1, 4, 32)).permute(0, 1, 4, 3, 2, 5)
    weight = NativeWeight(packed.contiguous(), atoms.contiguous().flatten(1), _outer(b.outer, len(packed), halves))
    if out is None:
        return weight
    if out.codes.shape != weight.codes.shape or out.outer.shape != weight.outer.shape:
        raise ValueError(f"out: holds a weight {tuple(out.codes.shape)}, not {tuple(weight.codes.shape)} (packed)")
    for name in ("codes", "scales", "outer"):
        getattr(out, name).copy_(getattr(weight, name))
    return out


def _three_dimensional(b: Quantized) -> tuple[Tensor, Tensor]:
    packed, scales = (x if x.ndim == 3 else x.unsqueeze(0) for x in (b.packed, b.scales))
    if packed.shape != (*scales.shape[:2], scales.shape[2] * BLOCK // 2):
        raise ValueError(f"weight: packed {tuple(packed.shape)} and scales {tuple(scales.shape)} do not fit together")
    return packed, scales


def prepare_hopper(b: Quantized, *, interleave: bool = False, out: HopperWeight | None = None) -> HopperWeight:
    """Reorder `b` ([N, K] or [experts, N, K]); into the storage of `out`, if given, which CUDA graphs then keep seeing.

    `outer` is [] or [experts]; with `interleave` also [2] or [experts, 2] (gate, up).
    Raises ValueError where shapes do not fit.
    """
    packed, scales = _three_dimensional(b)
    experts, n, blocks = scales.shape
    if interleave and n % 2:
        raise ValueError(f"weight: N = {n} is odd, so it has no gate and up halves")
    codes_out, scales_out = _reordered(packed, scales, interleave)
    outer = _outer(b.outer, experts, interleave)
    if out is None:
        return HopperWeight(codes_out, scales_out, outer, n, blocks * BLOCK, interleave)
    if out.codes.shape != codes_out.shape or out.interleaved != interleave or out.n != n:
        raise ValueError(
            f"out: holds a weight [{out.experts}, {out.n}, {out.k}], not [{experts}, {n}, {blocks * BLOCK}]"
        )
    for target, value in ((out.codes, codes_out), (out.scales, scales_out), (out.outer, outer)):
        target.copy_(value)
    return out


def _outer(outer: Tensor, experts: int, halves: bool) -> Tensor:
    """[experts], or [experts, 2] with `halves`, from one scale, one per expert, or one per expert and half.

    Always a copy, made last: a product launched next may prefetch codes and scales while this copy still runs.
    """
    flat, parts = outer.float().reshape(-1), 2 if halves else 1
    if flat.numel() not in (1, experts, experts * parts):
        raise ValueError(f"weight: outer scale of shape {tuple(outer.shape)} does not fit {experts} experts")
    rows = flat.reshape(experts, parts) if flat.numel() == experts * parts else flat.reshape(-1, 1)
    wide = rows.expand(experts, parts).clone()
    return wide if halves else wide.squeeze(1)


def _reordered(packed: Tensor, scales: Tensor, interleave: bool) -> tuple[Tensor, Tensor]:
    live = (scales & 0x7F) != 0
    words = packed.contiguous().view(torch.int64)  # one block of 16 codes each: [experts, N, K/16]
    words = torch.where(live, words, words & _repeat(0x8888))
    moved = sum(_moved(words, mask, shift) for mask, shift in _MOVES)
    assert isinstance(moved, Tensor)
    table = torch.tensor(_e5m3_table(), dtype=torch.uint8, device=scales.device)
    codes = _tiles(moved, interleave).permute(0, 1, 5, 3, 4, 2).contiguous()  # expert, tile, block, i, g, h
    bytes_out = _tiles(table[(scales & 0x7F).long()], interleave).permute(0, 1, 5, 4, 3, 2).contiguous()
    return codes.view(torch.uint8).flatten(3), bytes_out.flatten(3)


def _tiles(x: Tensor, interleave: bool) -> Tensor:
    """[experts, N, K/16] as [experts, tile, h, i, g, K/16], zero rows appended to whole tiles."""
    halves = x.unflatten(1, (2, -1)) if interleave else x.unsqueeze(1)
    rows = TILE // halves.shape[1]
    missing = -halves.shape[2] % rows
    padded = torch.nn.functional.pad(halves, (0, 0, 0, missing)) if missing else halves
    if interleave:
        return padded.unflatten(2, (-1, 4, 8)).permute(0, 2, 1, 3, 4, 5)
    return padded.squeeze(1).unflatten(1, (-1, 4, 2, 8)).permute(0, 1, 3, 2, 4, 5)


def _repeat(half: int) -> int:
    """A 16-bit pattern repeated over 64 bits, as a signed integer."""
    value = half * 0x0001_0001_0001_0001
    return value - (1 << 64) if value >> 63 else value


def _moved(words: Tensor, mask: int, shift: int) -> Tensor:
    if shift > 0:
        return (words & _repeat(mask)) << shift
    return (words >> -shift) & _repeat(mask >> -shift)  # mask after an arithmetic shift: no sign bits come along


def _e5m3_table() -> list[int]:
    """E5M3 byte (bias 10) for each E4M3 magnitude; 0 for zero, 0xFF for NaN."""
    subnormal = [0x00, 0x08, 0x10, 0x14, 0x18, 0x1A, 0x1C, 0x1E]
    return [*subnormal, *(code + 0x18 for code in range(8, 0x7F)), 0xFF]
