"""Group amax equals torch's, NaN and Inf included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quads.kernels import amax

Launch = Callable[..., Any]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 16, 4096, 16385])
def test_each_group_has_its_own_maximum(launch: Launch, dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(count)
    x = (torch.randn(3, count) * torch.tensor([[1e-3], [1.0], [100.0]])).to(dtype)
    got = launch(amax.group_amax, x, 3)
    assert torch.equal(got, x.float().abs().amax(dim=1))


def test_nan_and_inf_rise_to_the_top_of_their_group_only(launch: Launch) -> None:
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    x[1, 7], x[2, 9], x[2, 10] = float("-inf"), float("nan"), float("inf")
    got = launch(amax.group_amax, x, 4)
    assert got[0] == 1 and got[1] == torch.inf and got[2].isnan() and got[3] == 1


def test_subnormals_and_zero_survive(launch: Launch) -> None:
    x = torch.tensor([[0.0, -0.0], [1e-45, -1e-42]])
    assert torch.equal(launch(amax.group_amax, x, 2), x.abs().amax(dim=1))


def test_shapes_that_do_not_divide_and_strided_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 5\) does not divide into 2 groups"):
        amax.group_amax(torch.ones(3, 5), 2)
    with pytest.raises(ValueError, match="must be contiguous"):
        amax.group_amax(torch.ones(4, 4).T, 2)
