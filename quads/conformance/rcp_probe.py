"""`rcp.approx.ftz.f32` itself, through Triton's inline assembly. Imported only where a GPU is asked."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _rcp(source, target, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + at)
    y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(target + at, y)


def rcp_approx(x: Tensor) -> Tensor:
    """1/x as the GPU's instruction gives it; `x` float32 on CUDA, a multiple of 1024 elements."""
    if x.dtype != torch.float32 or x.numel() % _BLOCK:
        raise ValueError(
            f"x of shape {tuple(x.shape)}, dtype {x.dtype}: needs float32, a multiple of {_BLOCK} elements"
        )
    out = torch.empty_like(x)
    _rcp[(x.numel() // _BLOCK,)](x, out, BLOCK=_BLOCK)
    return out
