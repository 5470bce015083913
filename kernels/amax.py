"""Largest magnitude per group, in one read: the outer scales of a stack of expert weights.

Magnitudes are compared as integers (sign bit cleared), which orders floats and puts Inf and then NaN on top: a group
that holds NaN has amax NaN, so no further pass need look for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quads.kernels import support

_WIDTH, _STEPS = 4096, 4


def group_amax(x: Tensor, groups: int) -> Tensor:
    """amax of |x| over each of `groups` equal contiguous parts of `x` (float32, bfloat16, float16): float32 [groups].

    Raises ValueError where `x` is not contiguous or does not divide, RuntimeError where no kernel can run.
    """
    if not x.is_contiguous() or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"x of shape {tuple(x.shape)}, {x.dtype}: must be contiguous float32, bfloat16 or float16")
    if groups < 1 or x.numel() % groups:
        raise ValueError(f"x of shape {tuple(x.shape)} does not divide into {groups} groups")
    return _launch(x, groups) if support.interpreting() else group_amax_op(x, groups)


@torch.library.custom_op("quads::group_amax", mutates_args=())
def group_amax_op(x: Tensor, groups: int) -> Tensor:
    """The op behind `group_amax` (opaque to torch.compile); call that."""
    return _launch(x, groups)


@group_amax_op.register_fake
def _(x: Tensor, groups: int) -> Tensor:
    return x.new_empty(groups, dtype=torch.float32)


def _launch(x: Tensor, groups: int) -> Tensor:
    support.check_launch(x, "group_amax")
    bits = torch.zeros(groups, dtype=torch.int32, device=x.device)
    count = x.numel() // groups
    if count:
        from quads.kernels.quantize_details.amax_jit import group_amax_kernel

        integers = x.view(torch.int32 if x.element_size() == 4 else torch.int16)
        half = x.dtype == torch.float16
        grid = (-(-count // (_WIDTH * _STEPS)), groups)
        group_amax_kernel[grid](integers, bits, count, HALF=half, WIDTH=_WIDTH, STEPS=_STEPS, num_warps=8)
    return bits.view(torch.float32)
