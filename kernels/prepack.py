"""Weights in the order in which the kernels read them, written once per refit.

Hopper (gemm_details/decode.cu). For each tile of 64 rows and each block of 16 along K, 512 bytes of codes and 64 of
scales:
    codes  [i 4][g 8][h 2][8 bytes]   row = 16 i + 8 h + g of the tile; the 8 bytes are the row's 16 codes
    scales [g 8][i 4][h 2]
so that a lane of the tensor-core fragment reads 16 contiguous bytes, and a block that RAC repeats is contiguous too.
For SwiGLU (`interleave=True`) the two halves of N alternate: h = 0 is the gate's row 8 i + g of 32, h = 1 the up's.

How codes' bits move within a word and scales become E5M3: prepack_details/hopper_order.py. The magnitudes of a block
under a zero scale become zero, which changes no value. Rows past N are zero.

Native (gemm_details/native_jit.py). Codes stay as they are; scales go to the 128x4 layout of cuBLASLt and CUTLASS,
the rows of each expert padded to whole tiles of 128.

`exported` undoes both byte for byte (after a zero scale's magnitudes are cleared, for Hopper).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quads.emulation.quantizers import BLOCK
from quads.kernels.prepack_details import hopper_order
from quads.kernels.prepack_details.hopper_order import TILE as TILE
from quads.kernels.prepack_details.hopper_order import cleared as cleared


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
    codes, e5m3 = hopper_order.ordered(packed, scales, interleave)
    if out is None:
        flat = codes.contiguous().view(torch.uint8).flatten(3), e5m3.contiguous().flatten(3)
        return HopperWeight(*flat, _outer(b.outer, experts, interleave), n, blocks * BLOCK, interleave)
    outer = _outer(b.outer, experts, interleave)  # refuses before the first write
    if (out.codes.shape[:3], out.interleaved, out.n) != (codes.shape[:3], interleave, n):
        raise ValueError(
            f"out: holds a weight [{out.experts}, {out.n}, {out.k}], not [{experts}, {n}, {blocks * BLOCK}]"
        )
    out.codes.view(torch.int64).view(codes.shape).copy_(codes)
    out.scales.view(e5m3.shape).copy_(e5m3)
    out.outer.copy_(outer)
    return out


@dataclass(frozen=True)
class ExportedWeight:
    """A weight as it was before `prepare_*`: packed uint8 [experts, N, K/2], E4M3 scales uint8 [experts, N, K/16].

    outer: as the prepared weight holds it, float32 [experts] or, for gate and up halves, [experts, 2].
    """

    packed: Tensor
    scales: Tensor
    outer: Tensor


def exported(weight: PreparedWeight) -> ExportedWeight:
    """The inverse of `prepare_hopper` and `prepare_native`; shares what their order leaves in place (native codes)."""
    if isinstance(weight, HopperWeight):
        packed, scales = hopper_order.exported(weight.codes, weight.scales, weight.n, weight.interleaved)
        return ExportedWeight(packed, scales, weight.outer)
    blocks = weight.k // BLOCK
    atoms = weight.scales.view(weight.experts, -1, -(-blocks // 4), 32, 4, 4).permute(0, 1, 4, 3, 2, 5)
    linear = atoms.flatten(1, 3).flatten(2)[:, : weight.n, :blocks]
    return ExportedWeight(weight.codes, linear.contiguous(), weight.outer)


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
