"""NVFP4 quantisers.

The project's own dialect, `exact`: every division is correctly rounded FP32, nothing is a reciprocal.
    g    = fl(amax / 2688)                      outer scale, decode direction (a multiplier); 1 where amax = 0
    s    = e4m3_sat(fl(fl(v / 6) / g))          block scale, v = max|x| over 16 elements along K
    code = e2m1_sat(fl(x / fl(s * g)))          0 (sign kept) where s = 0
    Q(x) = fl(fl(q * s) * g)                    q * s is exact
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quads.emulation import formats, layout

BLOCK = 16
OUTER_MAX = formats.E2M1_MAX * formats.E4M3_MAX  # 2688

Granularity = Literal["tensor", "token"]


@dataclass(frozen=True)
class NVFP4Tensor:
    """Codes uint8 [..., K] (a nibble each), block scales E4M3 bytes uint8 [..., K/16], outer scale float32.

    The outer scale has shape [] (per tensor) or [..., 1] (per token). Value = code * block scale * outer scale.
    """

    codes: Tensor
    scales: Tensor
    outer: Tensor

    @property
    def packed(self) -> Tensor:
        return layout.pack(self.codes)


def outer_scale(x: Tensor, granularity: Granularity = "tensor") -> Tensor:
    """g = amax / 2688 as float32: shape [] (tensor) or [..., 1] (token); 1 where amax is 0."""
    magnitude = x.float().abs()
    amax = magnitude.amax() if granularity == "tensor" else magnitude.amax(dim=-1, keepdim=True)
    return torch.where(amax > 0, amax / OUTER_MAX, 1.0)


def quantize(x: Tensor, outer: Tensor | None = None, *, granularity: Granularity = "tensor") -> NVFP4Tensor:
    """Quantise `x` [..., K] (float32, bfloat16 or float16; K % 16 == 0) to NVFP4 along K.

    `outer` overrides the outer scale. Raises ValueError on a bad shape, an empty tensor, NaN or Inf.
    """
    check_input(x)
    value = x.float()
    g = outer_scale(value, granularity) if outer is None else outer.float()
    blocks = value.unflatten(-1, (-1, BLOCK))
    block_amax = blocks.abs().amax(dim=-1)
    scales = formats.encode(block_amax / formats.E2M1_MAX / g, formats.E4M3)
    step = formats.decode(scales, formats.E4M3) * g
    y = torch.where(step.unsqueeze(-1) > 0, blocks / step.unsqueeze(-1), blocks * 0)
    codes = formats.encode(y, formats.E2M1).flatten(-2)
    return NVFP4Tensor(codes, scales, g)


def dequantize(q: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Q(x) = (code * block scale) * outer scale, each product rounded to float32, then one cast to `dtype`."""
    return (unscaled(q) * q.outer).to(dtype)


def unscaled(q: NVFP4Tensor) -> Tensor:
    """code * block scale as float32, exact: at most six significant bits, so exact in bfloat16 too."""
    values = formats.decode(q.codes, formats.E2M1).unflatten(-1, (-1, BLOCK))
    return (values * formats.decode(q.scales, formats.E4M3).unsqueeze(-1)).flatten(-2)


def check_input(x: Tensor, name: str = "tensor") -> None:
    """Raise ValueError, naming tensor and rule, where no NVFP4 quantisation of `x` is defined."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name} has dtype {x.dtype}: NVFP4 quantisation takes float32, bfloat16 or float16")
    if x.ndim == 0 or x.numel() == 0:
        raise ValueError(f"{name} of shape {tuple(x.shape)} is empty: nothing to quantise")
    if x.shape[-1] % BLOCK:
        raise ValueError(f"{name} of shape {tuple(x.shape)}: K = {x.shape[-1]} is not a multiple of {BLOCK}")
    if not bool(x.isfinite().all()):
        raise ValueError(f"{name} of shape {tuple(x.shape)} holds NaN or Inf: refuse to quantise it")
