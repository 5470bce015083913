"""The contract `exact`: against exact rationals, at the ends of FP32, and on bad input."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quads.emulation import formats
from quads.emulation.quantizers import check_input, dequantize, outer_scale, quantize, trace, unscaled
from tests import oracle
from tests.blocks import amax_row, bfloat16_binade, block_maxima, blocks_at_ties
from tests.strategies import blocked_tensors


def tied_blocks(amax: float, dtype: torch.dtype) -> Tensor:
    """Blocks at the ties of the step that `exact` takes for them, under the outer scale of `amax`."""
    v = block_maxima(amax)
    seed = torch.zeros(len(v), 16)
    seed[:, 0] = v.float()
    outer = torch.tensor(amax) / torch.tensor(2688.0)
    step = (formats.decode(quantize(seed, outer).scales, formats.E4M3) * outer)[:, 0]
    return torch.cat([amax_row(amax, dtype), blocks_at_ties(v, torch.where(step > 0, step, 1.0), dtype)])


def assert_is_oracle(x: Tensor, outer: Tensor | None = None) -> None:
    q = quantize(x, outer)
    g = Fraction(float(q.outer))
    if outer is None:
        assert g == oracle.outer_scale(max(abs(Fraction(v)) for v in x.double().flatten().tolist()))
    for row, codes, scales in zip(x.double().tolist(), q.codes.tolist(), q.scales.tolist(), strict=True):
        for block, scale in enumerate(scales):
            part = slice(16 * block, 16 * block + 16)
            expected = oracle.quantize_block(row[part], g)
            assert (codes[part], scale) == (expected.codes, expected.scale), row[part]


@given(blocked_tensors())
def test_exact_is_the_contract_in_rationals_on_blocks_of_every_magnitude(x: Tensor) -> None:
    assert_is_oracle(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_exact_is_the_contract_in_rationals_at_ties_of_its_own_step(dtype: torch.dtype) -> None:
    random.seed(0)
    for amax in random.sample(bfloat16_binade(), 2):
        x = tied_blocks(amax, dtype)
        chosen = torch.tensor([0, *sorted(random.sample(range(1, len(x)), 60))])
        assert_is_oracle(x[chosen])


@given(blocked_tensors())
def test_dequantize_rounds_each_product_once(x: Tensor) -> None:
    q = quantize(x)
    got = dequantize(q).abs().flatten().tolist()
    scales = q.scales.repeat_interleave(16, dim=-1).flatten().tolist()
    outer = Fraction(float(q.outer))
    for value, code, scale in zip(got, q.codes.flatten().tolist(), scales, strict=True):
        assert Fraction(value) == oracle.dequantize(code, scale, outer)


def test_code_times_block_scale_is_exact_in_bfloat16() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 1)
    scales = torch.arange(127, dtype=torch.uint8).unsqueeze(1)
    q = type(quantize(torch.ones(1, 16)))(codes, scales, torch.tensor(1.0))
    assert torch.equal(unscaled(q).bfloat16().float(), unscaled(q))


def test_subnormal_input_is_not_flushed() -> None:
    x = torch.zeros(1, 16)
    x[0, :3] = torch.tensor([6 * 2.0**-140, -3 * 2.0**-140, 2.0**-140])
    q = quantize(x, torch.tensor(2.0**-140))
    assert q.scales.tolist() == [[0x38]]
    assert q.codes[0, :3].tolist() == [7, 13, 2]


def test_subnormal_step_is_not_flushed() -> None:
    """s * g = 2^-9 * 2^-120 is an FP32 subnormal; 6 of it is still representable and must come back."""
    x = torch.zeros(1, 16)
    x[0, :2] = torch.tensor([6 * 2.0**-129, -1.5 * 2.0**-129])
    q = quantize(x, torch.tensor(2.0**-120))
    assert q.scales.tolist() == [[0x01]]
    assert q.codes[0, :2].tolist() == [7, 0xB]
    assert torch.equal(dequantize(q), x)


def test_a_step_that_underflows_to_zero_gives_code_0_with_the_sign_kept() -> None:
    x = torch.tensor([[2.0**-149, -(2.0**-149), -0.0, *[0.0] * 13]])
    q = quantize(x, torch.tensor(2.0**-149))
    assert trace(x, torch.tensor(2.0**-149)).steps["s*g"].item() == 0.0
    assert q.codes[0, :3].tolist() == [0, 8, 8]


def test_negative_zero_keeps_its_sign() -> None:
    x = torch.ones(1, 16)
    x[0, 3] = -0.0
    assert quantize(x).codes[0, 3] == 8


def test_a_zero_tensor_has_outer_scale_1_and_zero_bytes() -> None:
    q = quantize(torch.zeros(2, 32))
    assert (q.outer.item(), q.codes.any().item(), q.scales.any().item()) == (1.0, False, False)


def test_the_largest_finite_float_survives() -> None:
    x = torch.full((1, 16), torch.finfo(torch.float32).max)
    q = quantize(x)
    assert q.scales.tolist() == [[0x7E]]
    assert (q.codes == 7).all()


def test_per_token_is_per_tensor_of_each_row() -> None:
    x = torch.randn(5, 64) * torch.tensor([1e-6, 1.0, 0.0, 3e4, 1e-3]).unsqueeze(1)
    q = quantize(x, granularity="token")
    assert q.outer.shape == (5, 1)
    for row in range(5):
        alone = quantize(x[row : row + 1])
        assert torch.equal(q.codes[row : row + 1], alone.codes)
        assert torch.equal(q.scales[row : row + 1], alone.scales)
        assert q.outer[row, 0] == alone.outer


@given(blocked_tensors(), st.integers(-20, 20))
def test_a_power_of_two_moves_only_the_outer_scale(x: Tensor, power: int) -> None:
    x = x.float() * 2.0 ** -round(float(torch.log2(x.float().abs().amax().clamp(min=1e-30))))
    q, moved = quantize(x), quantize(x * 2.0**power)
    assert torch.equal(q.codes, moved.codes)
    assert torch.equal(q.scales, moved.scales)


@given(blocked_tensors())
def test_bfloat16_input_is_its_float32_value(x: Tensor) -> None:
    q, wide = quantize(x.bfloat16()), quantize(x.bfloat16().float())
    assert torch.equal(q.codes, wide.codes) and torch.equal(q.scales, wide.scales)


def test_a_non_contiguous_tensor_quantises_as_its_copy() -> None:
    x = torch.randn(64, 32).t()
    assert torch.equal(quantize(x).codes, quantize(x.contiguous()).codes)


def test_16x16_tiles_share_the_largest_of_their_256() -> None:
    x = torch.randn(32, 48)
    scales = quantize(x, dialect="exact_16x16").scales
    tile_max = x.abs().unflatten(0, (2, 16)).unflatten(2, (3, 16)).amax(dim=(1, 3))
    g = outer_scale(x)
    expected = formats.encode(tile_max / torch.tensor(6.0) / g, formats.E4M3)
    assert torch.equal(scales, expected.repeat_interleave(16, dim=0))


def test_a_tile_of_the_transpose_is_the_transpose_of_the_tile() -> None:
    x = torch.randn(32, 32)
    q, t = quantize(x, dialect="exact_16x16"), quantize(x.t(), dialect="exact_16x16")
    assert torch.equal(q.codes, t.codes.t())


def test_four_over_six_never_has_the_larger_squared_error() -> None:
    x = torch.randn(8, 256)
    better = quantize(x, dialect="exact_four_over_six")
    six = quantize(x, better.outer, dialect=_six_of_256())
    error = [(dequantize(q) - x).square().unflatten(-1, (-1, 16)).sum(-1) for q in (better, six)]
    assert (error[0] <= error[1] * (1 + 1e-6)).all()
    assert (better.scales != six.scales).any()


def _six_of_256() -> object:
    from quads.emulation.dialects import load

    return load("exact_four_over_six").replace(name="six of 256", rule="six")


@pytest.mark.parametrize(
    ("x", "rule"),
    [
        (torch.zeros(2, 17), r"shape \(2, 17\).*K = 17 is not a multiple of 16"),
        (torch.zeros(0, 16), r"shape \(0, 16\) is empty"),
        (torch.tensor(1.0), r"shape \(\) is empty"),
        (torch.zeros(2, 16, dtype=torch.float64), "dtype torch.float64"),
        (torch.zeros(2, 16, dtype=torch.int32), "dtype torch.int32"),
        (torch.full((1, 16), torch.nan), "NaN or Inf"),
        (torch.full((1, 16), -torch.inf), "NaN or Inf"),
    ],
)
def test_bad_input_is_refused_with_its_shape_and_rule(x: Tensor, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        quantize(x)
    with pytest.raises(ValueError, match=f"weight.*{rule}"):
        check_input(x, "weight")


def test_one_nan_among_many_is_found() -> None:
    x = torch.randn(64, 64)
    x[63, 63] = torch.nan
    with pytest.raises(ValueError, match="NaN or Inf"):
        quantize(x)


def test_tiles_need_rows_in_sixteens() -> None:
    with pytest.raises(ValueError, match=r"shape \(15, 16\).*rows in a multiple of 16"):
        quantize(torch.ones(15, 16), dialect="exact_16x16")
