"""Fake-quantise for quantisation-aware training: value in, Q(value) out, straight-through gradient.

`quads::fake_quantize` is a torch custom op: it works under torch.compile, autocast and CUDA graphs, and on the local
shards of a DTensor, with the outer scale of the whole tensor handed in. Its codes are those of
`quads.kernels.quantize`; 16x16 blocks share one block scale. The CPU implementation is registered elsewhere
(`fake_quantize_op.register_kernel("cpu")`): this folder holds no second copy of the arithmetic.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from quads.kernels import support
from quads.kernels.quantize import BLOCK, Granularity, as_rows, outer_scale

WeightBlock = Literal["1x16", "16x16"]
_LANES = 128  # blocks of a program, one for each of four warps' threads (measured best: NOTES-quantize.md)
_BLOCKS_A_THREAD = 1


def fake_quantize(
    x: Tensor,
    outer: Tensor | None = None,
    *,
    weight_block: WeightBlock = "1x16",
    granularity: Granularity = "tensor",
) -> Tensor:
    """Q(x) in the shape and dtype of `x` [..., K] (float32, bfloat16, float16; K % 16 == 0), contiguous.

    outer: float32 with n elements, each for M/n consecutive rows of the M = x.numel() / K (n = 1: per tensor; n = M:
    per token; n = experts: per expert); None computes it from amax at `granularity`. 16x16 blocks must not cross from
    one outer scale to the next, nor from one matrix of a stack to the next. The gradient with respect to x is the
    gradient of the result. Raises ValueError on a bad shape, dtype or outer scale.
    """
    if support.interpreting():
        return _launch(x, outer, weight_block, granularity)
    return fake_quantize_op(x, outer, weight_block, granularity)


@torch.library.custom_op("quads::fake_quantize", mutates_args=())
def fake_quantize_op(x: Tensor, outer: Tensor | None, weight_block: str, granularity: str) -> Tensor:
    """The op behind `fake_quantize`; call that."""
    return _launch(x, outer, weight_block, granularity)


@fake_quantize_op.register_fake
def _(x: Tensor, outer: Tensor | None, weight_block: str, granularity: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _straight_through(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return grad, None, None, None


fake_quantize_op.register_autograd(_straight_through)


def _launch(x: Tensor, outer: Tensor | None, weight_block: str, granularity: str) -> Tensor:
    rows = as_rows(x)
    scales = _scales(x, rows, outer, weight_block, granularity)
    support.check_launch(x, "fake_quantize")
    from quads.kernels.quantize_details.fake_quant_jit import fake_quantize_kernel

    m, blocks = rows.shape[0], rows.shape[1] // BLOCK
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    across = min(1 << max(0, blocks - 1).bit_length(), _LANES // (16 if weight_block == "16x16" else 1))
    tile = {"ROWS": 16 if weight_block == "16x16" else _LANES // across, "BLOCKS": across}
    if m:
        fake_quantize_kernel[(-(-m // tile["ROWS"]) * -(-blocks // across),)](
            rows, out, scales, m, blocks, rows.stride(0) * rows.element_size() // 4, m // scales.numel(), **tile,
            SQUARE=weight_block == "16x16", MANY=scales.numel() > 1, NATIVE=support.native_level(),
            num_warps=max(1, tile["ROWS"] * across // (32 * _BLOCKS_A_THREAD)), enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _scales(x: Tensor, rows: Tensor, outer: Tensor | None, weight_block: str, granularity: str) -> Tensor:
    """Outer scales, flat float32, or ValueError."""
    if granularity not in ("tensor", "token"):
        raise ValueError(f"granularity '{granularity}' is unknown (known: tensor, token)")
    if weight_block not in ("1x16", "16x16"):
        raise ValueError(f"weight_block '{weight_block}' is unknown (known: 1x16, 16x16)")
    if outer is None:
        outer = outer_scale(rows, "token" if granularity == "token" else "tensor")
    m, n = rows.shape[0], max(1, outer.numel())
    if m % n:
        raise ValueError(f"outer of shape {tuple(outer.shape)}: {n} scales do not divide {m} rows")
    if weight_block == "16x16":
        if x.ndim < 2 or x.shape[-2] % BLOCK:
            raise ValueError(f"x of shape {tuple(x.shape)}: 16x16 blocks need a multiple of 16 rows")
        if (m // n) % BLOCK:
            raise ValueError(f"outer of shape {tuple(outer.shape)}: a 16x16 block needs one outer scale for its rows")
    return outer.to(device=rows.device, dtype=torch.float32).reshape(-1)
