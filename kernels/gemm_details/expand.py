"""The operands of the large products: NVFP4 decoded to bfloat16, code * block scale, exact (CUDA C++)."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from quads.emulation.quantizers import BLOCK
from quads.kernels.gemm_details import nvrtc
from quads.kernels.gemm_details.grouping import Grouping
from quads.kernels.prepack import HopperWeight, Quantized

_HERE = Path(__file__).parent
_THREADS = 256
_MOST_BLOCKS = 132 * 32  # of a pass that walks its input: a few waves on an H200


class _Tokens(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in ("codes", "scales", "out")), ("words", ctypes.c_longlong)]


class _Routed(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "slots", "groups", "out")),
        *((name, ctypes.c_int) for name in ("words", "share", "height")),
    ]


class _Weight(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "blocks", "groups", "out")),
        *((name, ctypes.c_int) for name in ("n", "k_blocks", "extra", "list_per_group", "row_blocks", "interleaved")),
    ]


def expand_tokens(a: Quantized) -> Tensor:
    """bfloat16 [M, K] of linear codes."""
    rows, width = a.scales.shape
    out = torch.empty((rows, width * BLOCK), dtype=torch.bfloat16, device=a.packed.device)
    words = rows * width * 2
    arguments = _Tokens(a.packed.data_ptr(), a.scales.data_ptr(), out.data_ptr(), words)
    _pass("expand_tokens")((min(-(-words // _THREADS), _MOST_BLOCKS), 1, 1), arguments)
    return out


def expand_routed(a: Quantized, grouping: Grouping) -> Tensor:
    """bfloat16 [slots, K] in the order of `grouping.slots`, a multiple of 8; an empty slot of a used block is zero.

    Row blocks past the last keep whatever the memory held.
    """
    slots, width = grouping.slots.numel(), a.scales.shape[1]
    out = torch.empty((slots, width * BLOCK), dtype=torch.bfloat16, device=a.packed.device)
    pointers = (x.data_ptr() for x in (a.packed, a.scales, grouping.slots, grouping.groups, out))
    arguments = _Routed(*pointers, width * 2, grouping.share, slots // grouping.groups.numel())
    _pass("expand_routed")((slots * 32 // _THREADS, 1, 1), arguments)
    return out


def expand_weight(b: HopperWeight, blocks: Tensor | None = None, groups: Tensor | None = None) -> Tensor:
    """bfloat16 [experts, N, K + 16 S] of prepared weights, the blocks named by `blocks` appended.

    blocks int32 [S] or [experts, S]. Rows of an interleaved weight alternate: 2 c is channel c's gate, 2 c + 1 its up.
    groups int32 (`Grouping.groups`): only the experts in it are decoded, the others keep whatever the memory held.
    """
    extra = 0 if blocks is None else blocks.shape[-1]
    width = b.k // BLOCK + extra
    out = torch.empty((b.experts, b.n, width * BLOCK), dtype=torch.bfloat16, device=b.codes.device)
    arguments = _Weight(
        *(None if x is None else x.data_ptr() for x in (b.codes, b.scales, blocks, groups, out)),
        b.n, b.k // BLOCK, extra, int(blocks is not None and blocks.ndim == 2),
        0 if groups is None else groups.numel(), int(b.interleaved),
    )  # fmt: skip
    _pass("expand_weight")((-(-width // 16), b.codes.shape[1], b.experts), arguments)
    return out


@cache
def _pass(name: str) -> nvrtc.Kernel:
    return nvrtc.load((_HERE / "e2m1.cuh", _HERE / "expand.cu"), name, (), _THREADS, 0)
