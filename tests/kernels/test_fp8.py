"""Kernel 6: the FP8 quantisers equal torch's own cast of correctly rounded quotients; the product keeps its bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quads.kernels import fp8 as kernel

Launch = Callable[..., Any]


def expected(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Codes (bytes) and scales with one scale for each rows x 128 tile."""
    value = x.float()
    padded = torch.nn.functional.pad(value, (0, -x.shape[1] % 128, 0, -x.shape[0] % rows))
    tiles = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, rows))
    amax = tiles.abs().amax(dim=(1, 3))
    scales = amax / torch.tensor(448.0)
    scales = torch.where(scales > 0, scales, 1.0)
    wide = scales.repeat_interleave(rows, 0).repeat_interleave(128, 1)[: x.shape[0], : x.shape[1]]
    return (value / wide).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scales


def uneven(m: int, k: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(m, k) * torch.exp(2 * torch.randn(m, 1)) * torch.exp(torch.randn(m, k))
    x[m // 2] = 0
    x[:, 1] = -0.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 128), (17, 300), (130, 256)])
def test_activations_have_a_scale_for_each_1x128(launch: Launch, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = uneven(*shape, dtype)
    codes, scales = expected(x, 1)
    got = launch(kernel.quantize_activation, x)
    assert torch.equal(got.scales, scales)
    assert torch.equal(got.codes.view(torch.uint8), codes)


@pytest.mark.parametrize("shape", [(128, 128), (130, 300)])
def test_weights_have_a_scale_for_each_128x128(launch: Launch, shape: tuple[int, int]) -> None:
    w = uneven(*shape, torch.bfloat16)
    codes, scales = expected(w, 128)
    got = launch(kernel.quantize_weight, w)
    assert torch.equal(got.scales, scales)
    assert torch.equal(got.codes.view(torch.uint8), codes)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 128), (5, 130, 300), (70, 256, 384)])
def test_the_product_stays_within_the_bound_of_its_accumulator(launch: Launch, m: int, n: int, k: int) -> None:
    """wgmma on E4M3 keeps 13 fraction bits below the largest term, and truncates once for each 32 of K: at most
    4 * 33 * 2^-13 of the largest product in a group of 128, here bounded by the group's sum of |a b|."""
    torch.manual_seed(1)
    a = launch(kernel.quantize_activation, torch.randn(m, k))
    b = launch(kernel.quantize_weight, torch.randn(n, k))
    got = launch(kernel.matmul, a, b, out_dtype=torch.float32)
    x = a.codes.double() * a.scales.double().repeat_interleave(128, 1)[:, :k]
    y = b.codes.double() * b.scales.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    bound = (2.0**-6 if torch.cuda.is_available() else 2.0**-20) * (x.abs() @ y.abs().T)
    assert ((got.double() - x @ y.T).abs() <= bound).all()


def test_bfloat16_output_is_the_rounded_float32_output(launch: Launch) -> None:
    torch.manual_seed(2)
    a = launch(kernel.quantize_activation, torch.randn(8, 256))
    b = launch(kernel.quantize_weight, torch.randn(64, 256))
    exact = launch(kernel.matmul, a, b, out_dtype=torch.float32)
    assert torch.equal(launch(kernel.matmul, a, b), exact.bfloat16())


def test_no_rows(launch: Launch) -> None:
    a = launch(kernel.quantize_activation, torch.empty(0, 128))
    b = launch(kernel.quantize_weight, torch.ones(16, 128))
    assert launch(kernel.matmul, a, b).shape == (0, 16)


def test_bad_input_is_refused_in_one_line(launch: Launch) -> None:
    with pytest.raises(ValueError, match=r"x has dtype torch\.int32"):
        launch(kernel.quantize_activation, torch.ones(2, 128, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"w of shape \(2, 2, 128\)"):
        launch(kernel.quantize_weight, torch.ones(2, 2, 128))
    a, b = launch(kernel.quantize_activation, torch.ones(2, 128)), launch(kernel.quantize_weight, torch.ones(2, 256))
    with pytest.raises(ValueError, match="K is 256, but a has 128"):
        launch(kernel.matmul, a, b)
