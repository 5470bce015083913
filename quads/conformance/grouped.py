"""Grouped products of experts: ragged and empty experts, unequal outer scales, NaN in one expert only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quads.conformance import products
from quads.conformance.products import Arithmetic, ProductCase, ProductQuestion, raw, scalar
from quads.conformance.protocol import DTYPES, Protocol
from quads.emulation import layout
from quads.emulation.quantizers import NVFP4Tensor

RAGGED = (0, 3, 128, 0, 129, 1, 0)


@dataclass(frozen=True)
class GroupedCase:
    """Rows of A [T, K] sorted by expert (`counts`), W [E, N, K], alphas [E] or [E, shards]."""

    name: str
    group: str
    a: NVFP4Tensor
    w: NVFP4Tensor
    alphas: Tensor
    counts: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class GroupedQuestion:
    """A case under an arithmetic of the products inside."""

    case: GroupedCase
    arithmetic: Arithmetic
    protocol: Protocol


def correct(q: GroupedQuestion) -> Tensor:
    """[T, N]: each expert's rows by its own weight, each part of N by its own alpha."""
    return torch.cat([products.correct(part) for part in parts(q)] or [_nothing(q)])


def parts(q: GroupedQuestion) -> list[ProductQuestion]:
    """The product of each expert that has rows; alpha as a row [1, N]."""
    case, found, start = q.case, [], 0
    for expert, count in enumerate(case.counts):
        if count:
            a = NVFP4Tensor(case.a.codes[start : start + count], case.a.scales[start : start + count], case.a.outer)
            b = NVFP4Tensor(case.w.codes[expert], case.w.scales[expert], case.w.outer)
            product = ProductCase(case.name, case.group, a, b, alpha_row(q, expert), case.dtype)
            found.append(ProductQuestion(product, q.arithmetic, q.protocol))
        start += count
    return found


def alpha_row(q: GroupedQuestion, expert: int) -> Tensor:
    """Alphas of one expert spread over its N columns, [1, N]."""
    alphas, columns = q.case.alphas[expert].reshape(-1), q.case.w.codes.shape[1]
    return alphas.repeat_interleave(columns // len(alphas)).unsqueeze(0)


def _nothing(q: GroupedQuestion) -> Tensor:
    return torch.empty(0, q.case.w.codes.shape[1], dtype=q.case.dtype)


def grouped_cases(protocol: Protocol) -> Iterator[GroupedCase]:
    """Ragged experts, one busy expert, all rows on the last, NaN scales in one expert."""
    k = -(-192 // protocol.k_multiple) * protocol.k_multiple
    for name in protocol.dtypes:
        for counts in (RAGGED, (16, 16, 16, 16), (0, 0, 0, 130), (129, 0, 1, 2)):
            label = ",".join(map(str, counts))
            yield _case(f"ragged/{label}", "ragged", counts, k, protocol, DTYPES[name])
        plain = _case("nan/one expert", "nan", (16, 16, 16, 16), k, protocol, DTYPES[name])
        scales = plain.a.scales.clone()
        scales[20, 1] = 0x7F
        yield replace(plain, a=NVFP4Tensor(plain.a.codes, scales, plain.a.outer))


def _case(
    name: str, group: str, counts: tuple[int, ...], k: int, protocol: Protocol, dtype: torch.dtype
) -> GroupedCase:
    experts, columns = len(counts), 128
    a = raw(sum(counts), k, seed=sum(counts))
    each = [raw(columns, k, seed=1000 + expert) for expert in range(experts)]
    w = NVFP4Tensor(torch.stack([x.codes for x in each]), torch.stack([x.scales for x in each]), scalar(1.0))
    index = torch.arange(experts * protocol.shards).reshape(experts, -1)
    alphas = 1.0 / (3.0 + (5 * index + 2) % 11).float()
    return GroupedCase(name, group, a, w, alphas.squeeze(-1) if protocol.shards == 1 else alphas, counts, dtype)


def arguments(case: GroupedCase, protocol: Protocol) -> tuple[object, ...]:
    """What the callable is given."""
    a_scales, w_scales = case.a.scales, case.w.scales
    if protocol.layout != "linear":
        form = layout.LAYOUTS[protocol.layout]
        a_scales = layout.swizzle_grouped(a_scales, list(case.counts), form)
        w_scales = layout.swizzle(w_scales, form)
    counts = torch.tensor(case.counts, dtype=torch.int32)
    a_packed, w_packed = layout.pack(case.a.codes), layout.pack(case.w.codes)
    return a_packed, a_scales, w_packed, w_scales, case.alphas, counts, case.dtype
