"""What grouped products get wrong: whose outer scale, whose weights, whose scale rows. Names as in faults.toml."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quads.conformance.grouped import GroupedQuestion, correct
from quads.emulation import layout
from quads.emulation.quantizers import NVFP4Tensor

Effect = Callable[[GroupedQuestion], Tensor]


def _changed(q: GroupedQuestion, **fields: object) -> Tensor:
    return correct(dataclasses.replace(q, case=dataclasses.replace(q.case, **fields)))  # type: ignore[arg-type]


def _alphas(change: Callable[[Tensor], Tensor], q: GroupedQuestion) -> Tensor:
    return _changed(q, alphas=change(q.case.alphas))


def _of_first_shard(alphas: Tensor) -> Tensor:
    return alphas if alphas.ndim == 1 else alphas[:, :1].expand_as(alphas)


def _shard_max(alphas: Tensor) -> Tensor:
    return alphas if alphas.ndim == 1 else alphas.amax(1, keepdim=True).expand_as(alphas)


def _shard_mean(alphas: Tensor) -> Tensor:
    return alphas if alphas.ndim == 1 else ((alphas[:, :1] + alphas[:, 1:2]) / 2).expand_as(alphas)


def _of_tile(q: GroupedQuestion) -> Tensor:
    """The alpha of a 128-row tile of the tight rows is that of its first row's expert."""
    counts = torch.tensor(q.case.counts)
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    first = owner[torch.arange(len(owner)) // 128 * 128] if len(owner) else owner
    columns = q.case.w.codes.shape[1]
    alphas = q.case.alphas.reshape(len(counts), -1)
    rows = alphas[first].repeat_interleave(columns // alphas.shape[1], dim=1)
    ones = _changed_acc(q)
    return (ones * rows).to(q.case.dtype)


def _changed_acc(q: GroupedQuestion) -> Tensor:
    """FP32 accumulators."""
    case = dataclasses.replace(q.case, alphas=torch.ones_like(q.case.alphas), dtype=torch.float32)
    return correct(dataclasses.replace(q, case=case))


def _weights(order: Callable[[GroupedQuestion], Tensor], q: GroupedQuestion) -> Tensor:
    index = order(q)
    w = q.case.w
    return _changed(q, w=NVFP4Tensor(w.codes[index], w.scales[index], w.outer))


def _before(q: GroupedQuestion) -> Tensor:
    return torch.arange(len(q.case.counts)).roll(1)


def _compacted(q: GroupedQuestion) -> Tensor:
    """Group number of each expert when empty ones are not counted."""
    busy = torch.tensor(q.case.counts) > 0
    return torch.where(busy, busy.cumsum(0) - 1, 0)


def _skipped(q: GroupedQuestion) -> Tensor:
    index, w = _compacted(q), q.case.w
    return _changed(q, w=NVFP4Tensor(w.codes[index], w.scales[index], w.outer), alphas=q.case.alphas[index])


def _first_scales(q: GroupedQuestion) -> Tensor:
    w = q.case.w
    return _changed(q, w=NVFP4Tensor(w.codes, w.scales[:1].expand_as(w.scales), w.outer))


def _tight(q: GroupedQuestion) -> Tensor:
    """Swizzled scales of all experts read as one matrix of T rows."""
    if q.protocol.layout == "linear" or not q.case.a.codes.shape[0]:
        return correct(q)
    form = layout.LAYOUTS[q.protocol.layout]
    rows, blocks = q.case.a.scales.shape
    raw = layout.swizzle_grouped(q.case.a.scales, list(q.case.counts), form)
    shape = layout.padded_shape(rows, blocks, form)
    scales = layout.unswizzle(raw.reshape(-1)[: shape[0] * shape[1]].reshape(shape), rows, blocks, form)
    return _changed(q, a=NVFP4Tensor(q.case.a.codes, scales.contiguous(), q.case.a.outer))


def _rows(keep: Callable[[int], int], q: GroupedQuestion) -> Tensor:
    """Rows of each expert from `keep(count)` on are zero."""
    out, start = correct(q).clone(), 0
    for count in q.case.counts:
        out[start + keep(count) : start + count] = 0
        start += count
    return out


def _spreads(q: GroupedQuestion) -> Tensor:
    out = correct(q)
    return torch.full_like(out, torch.nan) if bool(out.isnan().any()) else out


EFFECTS: dict[str, Effect] = {
    "alpha-of-first-expert": partial(_alphas, lambda alphas: alphas[:1].expand_as(alphas)),
    "alpha-of-neighbour": partial(_alphas, lambda alphas: alphas.roll(1, dims=0)),
    "alpha-max": partial(_alphas, lambda alphas: alphas.amax().expand_as(alphas)),
    "alpha-of-first-shard": partial(_alphas, _of_first_shard),
    "alpha-shard-max": partial(_alphas, _shard_max),
    "alpha-shard-mean": partial(_alphas, _shard_mean),
    "alpha-of-tile": _of_tile,
    "weights-of-neighbour": partial(_weights, _before),
    "empty-experts-skipped": _skipped,
    "weight-scales-of-first-expert": _first_scales,
    "scale-rows-tight": _tight,
    "rows-128-dropped": partial(_rows, lambda count: count // 128 * 128),
    "last-row-dropped": partial(_rows, lambda count: max(0, count - 1)),
    "nan-spreads": _spreads,
}
