"""Mutation tests of products: each known fault, planted in float64 code without the emulator, is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quads.conformance import faults
from quads.conformance.check import check_callable
from tests.quads.conformance_kernels import tiles, values

Part = Callable[..., Any]


def chain(a: Tensor, b: Tensor) -> Tensor:
    """FP32 accumulator over steps of 64, each toward zero. Exact in float64 but for five directed truncations."""
    acc = torch.zeros(len(a), len(b))
    for start in range(0, a.shape[1], 64):
        total = acc.double() + a[:, start : start + 64] @ b[:, start : start + 64].T
        acc = (total.view(torch.int64) & -(1 << 29)).view(torch.float64).float()
    return acc


def product(
    *,
    a_bytes: Part = lambda packed: packed,
    b_bytes: Part = lambda packed: packed,
    a_scales: Part = lambda scales: scales,
    b_scales: Part = lambda scales: scales,
    operand: Part = values,
    cut: Part = lambda x: x,
    alpha: Part = lambda alpha: alpha,
    cast: Part = lambda acc, alpha, dtype: (acc * alpha).to(dtype),
    after: Part = lambda out: out,
) -> Part:
    def call(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        left, right = operand(a_bytes(a), a_scales(sa)), operand(b_bytes(b), b_scales(sb))
        return after(cast(chain(cut(left), cut(right)), alpha(factor), dtype))

    return call


def swapped(packed: Tensor) -> Tensor:
    return (packed >> 4) | (packed << 4)


def neighbour(scales: Tensor) -> Tensor:
    return torch.cat([scales[:, -1:], scales[:, :-1]], dim=1)


def first_of_two(scales: Tensor) -> Tensor:
    out = scales.clone()
    out[:, 1::2] = out[:, 0::2][:, : out[:, 1::2].shape[1]]
    return out


def misread(scales: Tensor) -> Tensor:
    """Linear bytes at the offsets of 128x4."""
    m, b = scales.shape
    raw = torch.zeros(-(-m // 128) * 128 * -(-b // 4) * 4, dtype=torch.uint8)
    raw[: m * b] = scales.reshape(-1)
    where = torch.arange(m * b).reshape(m, b)
    row, block = where // b, where % b
    at = (row // 128 * -(-b // 4) + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    return raw[at]


def signed(packed: Tensor, scales: Tensor) -> Tensor:
    sign = torch.where(scales >= 0x80, -1.0, 1.0).double().repeat_interleave(16, dim=1)
    return values(packed, scales) * sign


def without_nan(packed: Tensor, scales: Tensor) -> Tensor:
    return values(packed, torch.where((scales & 0x7F) == 0x7F, 0, scales))


def cut_at(multiple: int) -> Part:
    return lambda x: x[:, : x.shape[1] - x.shape[1] % multiple]


def bits_of(acc: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
    return ((acc * alpha).view(torch.int32) >> 16 << 16).view(torch.float32).to(dtype)


def column_major(out: Tensor) -> Tensor:
    return out.T.contiguous().view(out.shape)


def blank(rows: bool) -> Part:
    def after(out: Tensor) -> Tensor:
        size = len(out) if rows else out.shape[1]
        out.narrow(0 if rows else 1, size - size % 128, size % 128).zero_()
        return out

    return after


MUTANTS: dict[str, Part] = {
    "a-nibbles-swapped": product(a_bytes=swapped),
    "b-nibbles-swapped": product(b_bytes=swapped),
    "a-scales-misread": product(a_scales=misread),
    "b-scales-misread": product(b_scales=misread),
    "scales-misread": product(a_scales=misread, b_scales=misread),
    "a-scale-of-neighbour": product(a_scales=neighbour),
    "b-scale-of-neighbour": product(b_scales=neighbour),
    "scales-shared-by-32": product(a_scales=first_of_two, b_scales=first_of_two),
    "a-scales-unused": product(a_scales=lambda scales: torch.full_like(scales, 0x38)),
    "b-scales-unused": product(b_scales=lambda scales: torch.full_like(scales, 0x38)),
    "scale-sign-kept": product(operand=signed),
    "nan-scale-dropped": product(operand=without_nan),
    "k-tail-32-dropped": product(cut=cut_at(32)),
    "k-tail-64-dropped": product(cut=cut_at(64)),
    "k-tail-128-dropped": product(cut=cut_at(128)),
    "alpha-missing": product(alpha=torch.ones_like),
    "alpha-inverse": product(alpha=lambda alpha: 1 / alpha),
    "alpha-squared": product(alpha=lambda alpha: alpha * alpha),
    "alpha-as-bfloat16": product(alpha=lambda alpha: alpha.bfloat16().float()),
    "output-truncated": product(cast=bits_of),
    "output-saturated": product(after=lambda out: out.clamp(-3.3895e38, 3.3895e38)),
    "output-through-float16": product(cast=lambda acc, alpha, dtype: (acc * alpha).half().to(dtype)),
    "output-transposed": product(after=column_major),
    "rows-128-dropped": product(after=blank(rows=True)),
    "columns-128-dropped": product(after=blank(rows=False)),
}


def test_the_correct_product_speaks_the_sequential_chain() -> None:
    report = check_callable(product(), "gemm")
    assert report.speaks[0] == "sequential"
    assert report.passed


def test_every_fault_of_the_table_has_a_mutant() -> None:
    assert set(MUTANTS) == set(faults.table()["gemm"])


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found_and_named(name: str) -> None:
    report = check_callable(MUTANTS[name], "gemm")
    assert not report.passed
    assert (name,) in report.faults, report.explanations
    assert len(report.faults) <= 2, report.faults


def test_nibbles_swapped_in_both_operands_cannot_be_seen() -> None:
    """The two products of a byte change places inside an exact sum: no output differs."""
    assert check_callable(product(a_bytes=swapped, b_bytes=swapped), "gemm").passed


def in_output_dtype(acc: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
    return acc.to(dtype) * alpha.to(dtype)


def in_float32(acc: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
    return (acc.to(dtype).float() * alpha).to(dtype)


@pytest.mark.parametrize(
    ("cast", "name"),
    [
        (in_output_dtype, "sequential, cast before alpha in the output dtype"),
        (in_float32, "sequential, cast before alpha"),
    ],
)
def test_an_epilogue_that_casts_before_alpha_is_another_arithmetic_by_name(cast: Part, name: str) -> None:
    """In bfloat16 the cast hides the order of the sum: other orders with this cast fit as well, none without it."""
    speaks = check_callable(product(cast=cast), "gemm").speaks
    assert speaks[0] == name
    assert all(other.endswith(name.removeprefix("sequential")) for other in speaks)


def test_padding_rows_that_reach_the_output_are_reported() -> None:
    """A kernel that sums whole tiles of scales: NaN of a padding row spreads to the tile."""

    def call(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        out = product()(a, unswizzled(sa, a), b, unswizzled(sb, b), alpha, dtype)
        return torch.full_like(out, torch.nan) if bool((sa == 0x7F).any()) and len(a) % 128 else out

    report = check_callable(call, "gemm", layout="128x4")
    assert "padding-read" in {finding.rule for finding in report.findings}


def unswizzled(scales: Tensor, packed: Tensor) -> Tensor:
    m, b = len(packed), packed.shape[1] // 8
    index = torch.arange(scales.numel(), dtype=torch.int64)
    place = [tiles(((index[: m * b] >> shift) & 255).to(torch.uint8).reshape(m, b)) for shift in (0, 8)]
    mask = tiles(torch.ones(m, b, dtype=torch.uint8)).reshape(-1) == 1
    where = (place[0].long() + 256 * place[1].long()).reshape(-1)
    out = torch.zeros(m * b, dtype=torch.uint8)
    out[where[mask]] = scales.reshape(-1)[mask]
    return out.reshape(m, b)


def grouped(
    *,
    alphas: Part = lambda alphas: alphas,
    weights: Part = lambda w, sw, counts: (w, sw),
    keep: Part = lambda count: count,
    after: Part = lambda out: out,
) -> Part:
    def call(
        a: Tensor, sa: Tensor, w: Tensor, sw: Tensor, factor: Tensor, counts: Tensor, dtype: torch.dtype
    ) -> Tensor:
        codes, scales = weights(w, sw, counts.tolist())
        factors, out, start = alphas(factor.reshape(len(counts), -1)), [], 0
        for expert, count in enumerate(counts.tolist()):
            acc = chain(
                values(a[start : start + count], sa[start : start + count]), values(codes[expert], scales[expert])
            )
            row = factors[expert].repeat_interleave(acc.shape[1] // factors.shape[1])
            acc[keep(count) :] = 0
            out.append((acc * row).to(dtype))
            start += count
        return after(torch.cat(out))

    return call


def packed_together(
    a: Tensor, sa: Tensor, w: Tensor, sw: Tensor, factor: Tensor, counts: Tensor, dtype: torch.dtype
) -> Tensor:
    """The n-th expert with rows takes the n-th weight and alpha."""
    index, busy = [], 0
    for count in counts.tolist():
        index.append(busy)
        busy += count > 0
    return grouped()(a, sa, w[index], sw[index], factor[index], counts, dtype)


def by_row_tile(
    a: Tensor, sa: Tensor, w: Tensor, sw: Tensor, factor: Tensor, counts: Tensor, dtype: torch.dtype
) -> Tensor:
    plain = grouped(alphas=torch.ones_like)(a, sa, w, sw, factor, counts, torch.float32)
    owner = [expert for expert, count in enumerate(counts.tolist()) for _ in range(count)]
    columns = plain.shape[1] // factor.reshape(len(counts), -1).shape[1]
    for row in range(len(plain)):
        plain[row] *= factor.reshape(len(counts), -1)[owner[row // 128 * 128]].repeat_interleave(columns)
    return plain.to(dtype)


def tight_scales(
    a: Tensor, sa: Tensor, w: Tensor, sw: Tensor, factor: Tensor, counts: Tensor, dtype: torch.dtype
) -> Tensor:
    """Swizzled scales of all experts, read as one matrix."""
    size = tiles(torch.zeros(len(a), a.shape[1] // 8, dtype=torch.uint8)).numel()
    scales = unswizzled(sa.reshape(-1)[:size], a)
    linear = torch.stack([unswizzled(s, c) for s, c in zip(sw, w, strict=True)])
    return grouped()(a, scales, w, linear, factor, counts, dtype)


def spread(out: Tensor) -> Tensor:
    return out * float("nan") if bool(out.isnan().any()) else out


GROUPED: dict[str, Part] = {
    "alpha-of-first-expert": grouped(alphas=lambda alphas: alphas[[0] * len(alphas)]),
    "alpha-of-neighbour": grouped(alphas=lambda alphas: torch.cat([alphas[-1:], alphas[:-1]])),
    "alpha-max": grouped(alphas=lambda alphas: torch.full_like(alphas, float(alphas.max()))),
    "alpha-of-first-shard": grouped(alphas=lambda alphas: alphas[:, [0, 0]]),
    "alpha-shard-max": grouped(alphas=lambda alphas: alphas.max(1, keepdim=True).values.repeat(1, 2)),
    "alpha-shard-mean": grouped(alphas=lambda alphas: alphas.mean(1, keepdim=True).repeat(1, 2)),
    "alpha-of-tile": by_row_tile,
    "weights-of-neighbour": grouped(weights=lambda w, sw, counts: (w.roll(1, 0), sw.roll(1, 0))),
    "empty-experts-skipped": packed_together,
    "weight-scales-of-first-expert": grouped(weights=lambda w, sw, counts: (w, sw[[0] * len(sw)])),
    "scale-rows-tight": tight_scales,
    "rows-128-dropped": grouped(keep=lambda count: count - count % 128),
    "last-row-dropped": grouped(keep=lambda count: max(count - 1, 0)),
    "nan-spreads": grouped(after=spread),
}


def test_every_grouped_fault_of_the_table_has_a_mutant() -> None:
    assert set(GROUPED) == set(faults.table()["moe"])


@pytest.mark.parametrize("shards", [1, 2])
def test_the_correct_grouped_product_conforms(shards: int) -> None:
    assert check_callable(grouped(), "moe", shards=shards).passed


@pytest.mark.parametrize("name", GROUPED)
def test_a_planted_grouped_fault_is_found_and_named(name: str) -> None:
    layout = "128x4" if name == "scale-rows-tight" else "linear"
    report = check_callable(GROUPED[name], "moe", shards=2 if "shard" in name else 1, layout=layout)
    assert not report.passed
    assert (name,) in report.faults, report.explanations
    assert len(report.faults) <= 2, report.faults
