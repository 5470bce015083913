"""Blocks of routed rows, and the weighted sum that brings them back; in CUDA C++ on a GPU, else in torch."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from quads.kernels.gemm_details import nvrtc
from quads.kernels.gemm_details.grouping import Grouping

_HERE = Path(__file__).parent
_HEADER = _HERE.parent / "gemm_details" / "e2m1.cuh"


class _Route(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("experts_of", "slots", "groups")),
        *((name, ctypes.c_int) for name in ("pairs", "experts", "width", "max_blocks")),
    ]


class _Combine(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("y", "weights", "experts_of", "out")),
        *((name, ctypes.c_int) for name in ("top_k", "pairs_per_row", "experts")),
    ]


def route(topk_ids: Tensor, experts: int, width: int) -> Grouping:
    """Blocks of `width` rows of one expert each, for ids int32 [M, top_k]; ids outside 0..experts-1 are left out.

    Rows are pairs, token * top_k + k. The number of blocks is the most that any routing can need: no wait for the GPU.
    """
    pairs = topk_ids.numel()
    max_blocks = most_blocks(pairs, experts, width)
    slots = torch.empty(max_blocks * width, dtype=torch.int32, device=topk_ids.device)
    groups = torch.empty(max_blocks, dtype=torch.int32, device=topk_ids.device)
    if pairs and topk_ids.is_cuda:
        arguments = _Route(topk_ids.data_ptr(), slots.data_ptr(), groups.data_ptr(), pairs, experts, width, max_blocks)
        _kernel("route", 0, 8 * experts)((1, 1, 1), arguments)
    elif pairs:
        _route_in_torch(topk_ids.flatten(), experts, width, slots, groups)
    return Grouping(slots, groups, topk_ids.shape[1], pairs)


def most_blocks(pairs: int, experts: int, width: int) -> int:
    """The most blocks of `width` rows that `pairs` routed rows can need."""
    return min(pairs, experts) + pairs // width


def _route_in_torch(ids: Tensor, experts: int, width: int, slots: Tensor, groups: Tensor) -> None:
    routed = (ids >= 0) & (ids < experts)
    order = torch.where(routed, ids, experts).argsort(stable=True)
    counts = torch.bincount(ids[routed], minlength=experts)
    blocks = (counts + width - 1) // width
    first = (blocks.cumsum(0) - blocks) * width
    slots.fill_(-1)
    groups.fill_(-1)
    groups[: int(blocks.sum())] = torch.arange(experts, dtype=torch.int32).repeat_interleave(blocks)
    rank = torch.arange(len(ids)) - (counts.cumsum(0) - counts)[ids[order].clamp(0, experts - 1)]
    kept = routed[order]
    slots[(first[ids[order].clamp(0, experts - 1)] + rank)[kept]] = order[kept].int()


def combine(y: Tensor, weights: Tensor, topk_ids: Tensor, experts: int, out_dtype: torch.dtype) -> Tensor:
    """cast(sum over k, ascending, of fl(weight * y)) in FP32: y bfloat16 [M top_k, N], weights float32 [M, top_k]."""
    tokens, top_k = weights.shape
    if y.is_cuda and y.shape[1] % 2 == 0:
        out = torch.empty((tokens, y.shape[1]), dtype=out_dtype, device=y.device)
        pointers = (x.data_ptr() for x in (y, weights, topk_ids, out))
        if tokens:
            grid = (-(-y.shape[1] // 512), tokens, 1)
            kernel = _kernel("combine", int(out_dtype == torch.float32), 0)
            kernel(grid, _Combine(*pointers, top_k, y.shape[1] // 2, experts))
        return out
    routed = (topk_ids >= 0) & (topk_ids < experts)
    rows = torch.where(routed.unsqueeze(-1), y.float().unflatten(0, (tokens, top_k)), 0.0)
    total = torch.zeros((tokens, y.shape[1]), device=y.device)
    for k in range(top_k):
        total = total + torch.where(routed, weights, 0.0)[:, k : k + 1] * rows[:, k]
    return total.to(out_dtype)


@cache
def _kernel(name: str, out_float: int, shared: int) -> nvrtc.Kernel:
    threads = 1024 if name == "route" else 256
    return nvrtc.load((_HEADER, _HERE / "route.cu"), name, (("OUT_FLOAT", out_float),), threads, shared)
