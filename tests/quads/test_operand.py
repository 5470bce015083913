"""An operand answers products and refuses what would silently skip activation numerics."""

import pytest
import torch
from torch.nn import functional as F

from quads.operand import OperandWeight


class Doubling:
    """Twice the plain product, so that a missed interception shows."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def expert(self, index: int) -> "Doubling":
        return Doubling(self.weight[index])

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x @ self.weight.T

    def grouped_matmul(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        bounds = [0, *ends.tolist()]
        return torch.cat([self.expert(e).matmul(x[bounds[e] : bounds[e + 1]]) for e in range(len(ends))])


W = torch.arange(12.0).reshape(3, 4)
E = torch.arange(24.0).reshape(2, 3, 4)
X = torch.ones(2, 4)


def test_linear_matmul_and_transposes_reach_the_product() -> None:
    w = OperandWeight.wrap(W.clone(), Doubling(W))
    expected = 2 * X @ W.T
    for y in (F.linear(X, w), X @ w.T, X @ w.mT, torch.matmul(X, w.t()), X.matmul(w.transpose(0, 1))):
        assert type(y) is torch.Tensor and torch.equal(y, expected)
    assert torch.equal(F.linear(X, w, torch.ones(3)), expected + 1)
    assert F.linear(X.reshape(1, 2, 4), w).shape == (1, 2, 3)


def test_expert_index_grouped_and_batched_products_reach_the_product() -> None:
    w = OperandWeight.wrap(E.clone(), Doubling(E))
    rows = torch.ones(3, 4)
    expected = torch.cat([2 * rows[:1] @ E[0].T, 2 * rows[1:] @ E[1].T])
    assert torch.equal(F.linear(X, w[1]), 2 * X @ E[1].T)
    assert torch.equal(F.linear(X, w[torch.tensor(1)]), 2 * X @ E[1].T)
    ends = torch.tensor([1, 3], dtype=torch.int32)
    assert torch.equal(F.grouped_mm(rows, w.transpose(-2, -1), offs=ends), expected)
    assert torch.equal(torch._grouped_mm(rows, w.mT, offs=ends), expected)
    assert torch.equal(torch.bmm(rows[:2].reshape(2, 1, 4), w.mT), 2 * rows[:2].reshape(2, 1, 4) @ E.mT)


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w[torch.tensor([0, 1])],
        lambda w: w + 1,
        lambda w: torch.einsum("nk,mk->mn", w[0], X),
        lambda w: w.reshape(-1),
        lambda w: w.transpose(0, 1),
        lambda w: torch.matmul(X, w[0]),
        lambda w: F.linear(X, w[0].T),
    ],
)
def test_anything_else_is_refused(use) -> None:
    with pytest.raises(NotImplementedError, match="quantised weight"):
        use(OperandWeight.wrap(E.clone(), Doubling(E)))


def test_reading_shape_dtype_and_a_copy_of_the_value_is_allowed() -> None:
    w = OperandWeight.wrap(E.clone(), Doubling(E))
    assert w.shape == E.shape and w.dtype == E.dtype and w.numel() == 24
    assert torch.equal(w.detach(), E) and type(w.clone()) is torch.Tensor
