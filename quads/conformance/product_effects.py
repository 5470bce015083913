"""What products get wrong: operands, scales, tails, alpha, casts. Names are those of faults.toml."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from quads.conformance import protocol as contract
from quads.conformance.products import ONE, ProductQuestion, accumulated, correct
from quads.emulation import gemm, layout
from quads.emulation.quantizers import BLOCK, NVFP4Tensor

Side = Literal["a", "b"]
Operands = Callable[[NVFP4Tensor, ProductQuestion], NVFP4Tensor]
Effect = Callable[[ProductQuestion], Tensor]


def _operand(side: Side, change: Operands, q: ProductQuestion) -> Tensor:
    changed = change(q.case.a if side == "a" else q.case.b, q)
    case = dataclasses.replace(q.case, a=changed) if side == "a" else dataclasses.replace(q.case, b=changed)
    return correct(dataclasses.replace(q, case=case))


def _both(change: Operands, q: ProductQuestion) -> Tensor:
    case = dataclasses.replace(q.case, a=change(q.case.a, q), b=change(q.case.b, q))
    return correct(dataclasses.replace(q, case=case))


def _swapped(x: NVFP4Tensor, q: ProductQuestion) -> NVFP4Tensor:
    return NVFP4Tensor(x.codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), x.scales, x.outer)


def _misread(x: NVFP4Tensor, q: ProductQuestion) -> NVFP4Tensor:
    """Swizzled scales read row-major, or row-major scales read as 128x4."""
    rows, blocks = x.scales.shape
    if q.protocol.layout != "linear":
        raw = contract.write_scales(x.scales, q.protocol, poison=q.case.poison)
        return NVFP4Tensor(x.codes, raw.reshape(raw.shape)[:rows, :blocks].contiguous(), x.outer)
    shape = layout.padded_shape(rows, blocks)
    raw = torch.zeros(shape[0] * shape[1], dtype=torch.uint8)
    raw[: x.scales.numel()] = x.scales.reshape(-1)
    return NVFP4Tensor(x.codes, layout.unswizzle(raw.reshape(shape), rows, blocks).contiguous(), x.outer)


def _neighbour_scale(x: NVFP4Tensor, q: ProductQuestion) -> NVFP4Tensor:
    return NVFP4Tensor(x.codes, x.scales.roll(1, dims=-1), x.outer)


def _shared_by_32(x: NVFP4Tensor, q: ProductQuestion) -> NVFP4Tensor:
    blocks = x.scales.shape[-1]
    return NVFP4Tensor(x.codes, x.scales[..., ::2].repeat_interleave(2, -1)[..., :blocks], x.outer)


def _no_scales(x: NVFP4Tensor, q: ProductQuestion) -> NVFP4Tensor:
    return NVFP4Tensor(x.codes, torch.full_like(x.scales, ONE), x.outer)


def _signed_scales(x: NVFP4Tensor, q: ProductQuestion) -> NVFP4Tensor:
    """The sign of a scale negates its block (E4M3 instead of UE4M3)."""
    negative = (x.scales >> 7).repeat_interleave(BLOCK, dim=-1) << 3
    return NVFP4Tensor(x.codes ^ negative, x.scales & 0x7F, x.outer)


def _nan_scale_is_zero(x: NVFP4Tensor, q: ProductQuestion) -> NVFP4Tensor:
    return NVFP4Tensor(x.codes, torch.where((x.scales & 0x7F) == 0x7F, 0, x.scales), x.outer)


def _k_tail(multiple: int, x: NVFP4Tensor, q: ProductQuestion) -> NVFP4Tensor:
    kept = x.codes.shape[-1] // multiple * multiple
    codes, scales = x.codes.clone(), x.scales.clone()
    codes[..., kept:], scales[..., kept // BLOCK :] = 0, 0
    return NVFP4Tensor(codes, scales, x.outer)


def _alpha(change: Callable[[Tensor], Tensor], q: ProductQuestion) -> Tensor:
    changed = dataclasses.replace(q.case, alpha=change(q.case.alpha))
    changed.sums.update(q.case.sums)  # the operands are the same
    return correct(dataclasses.replace(q, case=changed))


def _truncated(q: ProductQuestion) -> Tensor:
    """FP32 results are cut to the output dtype toward zero."""
    exact = gemm.epilogue(accumulated(q), q.case.alpha, torch.float32)
    if q.case.dtype != torch.bfloat16:
        return correct(q)
    return (exact.view(torch.int32) & -0x10000).view(torch.float32).to(torch.bfloat16)


def _saturated(q: ProductQuestion) -> Tensor:
    return correct(q).clamp(-torch.finfo(q.case.dtype).max, torch.finfo(q.case.dtype).max)


def _through(dtype: torch.dtype, q: ProductQuestion) -> Tensor:
    exact = gemm.epilogue(accumulated(q), q.case.alpha, torch.float32)
    return exact.to(dtype).to(q.case.dtype)


def _rows_dropped(multiple: int, q: ProductQuestion) -> Tensor:
    out = correct(q).clone()
    out[out.shape[0] // multiple * multiple :] = 0
    return out


def _columns_dropped(multiple: int, q: ProductQuestion) -> Tensor:
    out = correct(q).clone()
    out[:, out.shape[1] // multiple * multiple :] = 0
    return out


def _transposed(q: ProductQuestion) -> Tensor:
    out = correct(q)
    return out.T.reshape(out.shape).contiguous()


EFFECTS: dict[str, Effect] = {
    "a-nibbles-swapped": partial(_operand, "a", _swapped),
    "b-nibbles-swapped": partial(_operand, "b", _swapped),
    "a-scales-misread": partial(_operand, "a", _misread),
    "b-scales-misread": partial(_operand, "b", _misread),
    "scales-misread": partial(_both, _misread),
    "a-scale-of-neighbour": partial(_operand, "a", _neighbour_scale),
    "b-scale-of-neighbour": partial(_operand, "b", _neighbour_scale),
    "scales-shared-by-32": partial(_both, _shared_by_32),
    "a-scales-unused": partial(_operand, "a", _no_scales),
    "b-scales-unused": partial(_operand, "b", _no_scales),
    "scale-sign-kept": partial(_both, _signed_scales),
    "nan-scale-dropped": partial(_both, _nan_scale_is_zero),
    "k-tail-32-dropped": partial(_both, partial(_k_tail, 32)),
    "k-tail-64-dropped": partial(_both, partial(_k_tail, 64)),
    "k-tail-128-dropped": partial(_both, partial(_k_tail, 128)),
    "alpha-missing": partial(_alpha, torch.ones_like),
    "alpha-inverse": partial(_alpha, lambda alpha: 1.0 / alpha),
    "alpha-squared": partial(_alpha, lambda alpha: alpha * alpha),
    "alpha-as-bfloat16": partial(_alpha, lambda alpha: alpha.bfloat16().float()),
    "output-truncated": _truncated,
    "output-saturated": _saturated,
    "output-through-float16": partial(_through, torch.float16),
    "output-transposed": _transposed,
    "rows-128-dropped": partial(_rows_dropped, 128),
    "columns-128-dropped": partial(_columns_dropped, 128),
}
