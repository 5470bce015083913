"""Residual, order-free scores, selection: worked by hand and against exact rationals."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quads.emulation import quantizers, residual


def test_the_residual_is_what_one_quantisation_leaves() -> None:
    x = torch.tensor([[6.0, 0.4, 5.1, -0.2, *[0.0] * 12]])
    q = quantizers.quantize(x, torch.tensor(1.0))
    assert quantizers.dequantize(q)[0, :4].tolist() == [6.0, 0.5, 6.0, -0.0]
    expected = torch.tensor([0.0, 0.4, 5.1, -0.2]) - torch.tensor([0.0, 0.5, 6.0, 0.0])
    assert torch.equal(residual.residual(x, q)[0, :4], expected)


def exact_scores(r: torch.Tensor, exponent: int) -> list[int]:
    """floor(fl((r * 2^-E)^2) * 2^20), summed over each block, in rational arithmetic around one FP32 rounding."""
    scores = []
    for block in r.reshape(-1, 16).tolist():
        total = 0
        for value in block:
            square = Fraction(value) * Fraction(2) ** -exponent
            rounded = torch.tensor(float(square * square), dtype=torch.float64).float()
            total += int(Fraction(float(rounded)) * 2**20 // 1)
        scores.append(total)
    return scores


@given(st.integers(0, 10**6), st.integers(-140, 100))
def test_scores_are_the_stated_integers_at_any_scale(seed: int, exponent: int) -> None:
    r = torch.randn(2, 32, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    outer = torch.full((2, 1), 1.5 * 2.0**exponent)
    assert residual.block_scores(r, outer).flatten().tolist() == exact_scores(r, exponent)


@given(st.integers(0, 10**6))
def test_scores_do_not_depend_on_the_order_of_rows(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    r = torch.randn(9, 64, generator=generator)
    shuffled = r[torch.randperm(9, generator=generator)]
    total = residual.block_scores(r, torch.tensor(1.0)).sum(0)
    assert torch.equal(total, residual.block_scores(shuffled, torch.tensor(1.0)).sum(0))


def test_rows_that_choose_alone_have_units_of_their_own() -> None:
    r = torch.ones(2, 16)
    outer = torch.tensor([[1.0], [4.0]])
    assert residual.block_scores(r, outer).tolist() == [[2**20], [2**20]]
    assert residual.block_scores(r, outer, shared=False).tolist() == [[16 * 2**20], [2**20]]


def test_top_blocks_are_ascending_and_ties_go_to_the_lower_index() -> None:
    scores = torch.tensor([[5, 9, 5, 9], [1, 1, 1, 1]])
    assert residual.top_blocks(scores, 3).tolist() == [[0, 1, 3], [0, 1, 2]]
    assert residual.top_blocks(scores, 0).shape == (2, 0)


@pytest.mark.parametrize("blocks", [torch.tensor([0, 2]), torch.tensor([[0, 2], [1, 3], [3, 0]])])
def test_gathered_blocks_are_the_columns_of_the_blocks(blocks: torch.Tensor) -> None:
    x = torch.arange(3 * 64).reshape(3, 64)
    got = residual.gather_blocks(x, blocks)
    for row in range(3):
        chosen = blocks if blocks.ndim == 1 else blocks[row]
        assert got[row].tolist() == [int(x[row, 16 * b + i]) for b in chosen for i in range(16)]


def test_the_residual_keeps_the_outer_scale_and_shrinks_the_error() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    q = quantizers.quantize(x, granularity="token")
    second = residual.quantize_residual(x, q, torch.arange(4))
    assert torch.equal(second.outer, q.outer)
    once = (quantizers.dequantize(q) - x).norm()
    twice = (quantizers.dequantize(q) + quantizers.dequantize(second) - x).norm()
    assert twice < 0.25 * once
