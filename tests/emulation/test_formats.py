"""Formats against ml_dtypes, torch, numpy and gfloat; each place where an oracle differs is a test of its own.

Inputs are all 2^16 bf16 and fp16 patterns and, as FP32, both neighbours of every rounding boundary.
"""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import RoundMode, encode_ndarray, round_ndarray
from gfloat import formats as gfloat_formats
from hypothesis import given
from torch import Tensor

from quads.emulation import formats
from quads.emulation.formats import BF16, E2M1, E4M3, E5M2, E8M0, FP16, TF32, UE4M3, Format, decode, encode
from quads.emulation.formats import encode_by_definition as by_definition
from tests import oracle
from tests.strategies import float32_bits

SMALL = [E2M1, E4M3, E5M2]
SIGNED = [E2M1, E4M3, E5M2, FP16, BF16, TF32]


def patterns16(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def boundaries(fmt: Format) -> Tensor:
    """FP32: every value, every midpoint of neighbours, the overflow boundary, and both neighbours of each; +-."""
    values = formats._magnitudes(fmt)[: fmt.max_code + 1].double()
    spacing = values[-1] - values[-2]
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, values[-1] + spacing * torch.tensor([0.5, 1.0, 1.5])])
    x = points[points < torch.finfo(torch.float32).max].float()
    x = torch.cat([torch.nextafter(x, torch.tensor(torch.inf)), x, torch.nextafter(x, torch.tensor(-torch.inf))])
    return torch.cat([x, -x, torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, torch.finfo(torch.float32).max])])


def inputs(fmt: Format) -> Tensor:
    every = torch.cat([patterns16(torch.bfloat16).float(), patterns16(torch.float16).float()])
    return torch.cat([every, boundaries(fmt) if fmt.bits <= 16 else torch.empty(0)])


def codes_of(x: np.ndarray, dtype: object, bits: int) -> Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(x.astype(dtype).view(np.uint8 if bits <= 8 else np.uint16).astype(np.int32))


def assert_same(ours: Tensor, theirs: Tensor, x: Tensor) -> None:
    wrong = (ours.int() != theirs.int()).nonzero().flatten()
    if len(wrong):
        first = wrong[0]
        raise AssertionError(f"{len(wrong)} of {len(x)} differ; first x = {x[first]}: {ours[first]}, {theirs[first]}")


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2), (E2M1, ml_dtypes.float4_e2m1fn)],
)
def test_8_bit_formats_are_ml_dtypes_but_for_nan(fmt: Format, dtype: object) -> None:
    """NaN itself: E4M3 agrees, E5M2 is 0x7E there (0x7F here and in PTX), E2M1 becomes 0 there (+6 here and in PTX)."""
    x = inputs(fmt)
    x = x if fmt is E4M3 else x[~x.isnan()]
    assert_same(encode(x, fmt, saturate=False), codes_of(x.numpy(), dtype, 8), x)


@pytest.mark.parametrize(("fmt", "dtype"), [(BF16, ml_dtypes.bfloat16), (FP16, np.float16)])
def test_16_bit_formats_are_ml_dtypes_and_numpy_but_for_nan_payloads(fmt: Format, dtype: object) -> None:
    x = inputs(fmt)
    x = x[~x.isnan()]
    assert_same(encode(x, fmt, saturate=False), codes_of(x.numpy(), dtype, 16), x)


@pytest.mark.parametrize(("fmt", "dtype"), [(BF16, torch.bfloat16), (FP16, torch.float16)])
def test_16_bit_formats_are_torch_but_for_nan_payloads(fmt: Format, dtype: torch.dtype) -> None:
    x = inputs(fmt)
    x = x[~x.isnan()]
    assert_same(encode(x, fmt, saturate=False), x.to(dtype).view(torch.int16).int() & 0xFFFF, x)


def test_e5m2_is_torch_on_every_input_nan_included() -> None:
    x = inputs(E5M2)
    assert_same(encode(x, E5M2, saturate=False), x.to(torch.float8_e5m2).view(torch.uint8), x)


def test_e4m3_is_torch_up_to_overflow_where_torch_builds_differ() -> None:
    """torch 2.13 on a CPU saturates above 464, Inf too; ml_dtypes, and earlier torch, give NaN. 464 ties to 448."""
    x = inputs(E4M3)
    x = x[(x.abs() <= 464) | x.isnan()]
    assert_same(encode(x, E4M3, saturate=False), x.to(torch.float8_e4m3fn).view(torch.uint8), x)
    assert encode(torch.tensor([464.0, 465.0]), E4M3, saturate=False).tolist() == [0x7E, 0x7F]


def test_e8m0_is_torch_for_what_has_no_sign() -> None:
    """torch ignores the sign of a negative number; here, as in ml_dtypes, it is NaN. Both round every number of
    (2^-127, 1.5 * 2^-127) away from its nearest code 0: FP32 subnormals, taken for their bits. cvt has no rn here.
    """
    x = inputs(E8M0)
    x = x[~torch.signbit(x) & ((x <= 2.0**-127) | (x >= 1.5 * 2.0**-127) | x.isnan())]
    assert_same(encode(x, E8M0, saturate=False), x.to(torch.float8_e8m0fnu).view(torch.uint8), x)
    assert encode(torch.tensor([-1.0]), E8M0).tolist() == [0xFF]


def test_e8m0_is_ml_dtypes_from_its_second_code_up() -> None:
    """ml_dtypes has no code for zero (NaN there, 2^-127 here and in torch) and rounds (2^-127, 1.5 * 2^-127) up too."""
    x = inputs(E8M0)
    x = x[(x >= 2.0**-126) | (x < 0) | x.isnan() | (x == 2.0**-127)]
    assert_same(encode(x, E8M0, saturate=False), codes_of(x.numpy(), ml_dtypes.float8_e8m0fnu, 8), x)


@pytest.mark.parametrize(
    ("fmt", "info"),
    [
        (E2M1, gfloat_formats.format_info_ocp_e2m1),
        (E4M3, gfloat_formats.format_info_ocp_e4m3),
        (E5M2, gfloat_formats.format_info_ocp_e5m2),
        (BF16, gfloat_formats.format_info_bfloat16),
        (FP16, gfloat_formats.format_info_binary16),
    ],
)
@pytest.mark.parametrize(("rounding", "mode"), [("rne", RoundMode.TiesToEven), ("rz", RoundMode.TowardZero)])
@pytest.mark.parametrize("saturate", [True, False])
def test_every_format_is_gfloat_in_both_roundings(
    fmt: Format, info: object, rounding: str, mode: RoundMode, saturate: bool
) -> None:
    """Two policies of gfloat differ. Saturated Inf stays Inf where the format has one (here it saturates, as satfinite
    does), and overflow of E2M1, which has neither Inf nor NaN, raises unless it saturates."""
    x = boundaries(fmt)
    x = x[x.isfinite()]
    rounded = round_ndarray(info, x.numpy().astype(np.float64), mode, sat=saturate or fmt is E2M1)
    theirs = torch.from_numpy(encode_ndarray(info, rounded).astype(np.int32))
    ours = encode(x, fmt, saturate=saturate, rounding=rounding)  # type: ignore[arg-type]
    assert_same(_one_nan(ours, fmt), _one_nan(theirs, fmt), x)


def _one_nan(codes: Tensor, fmt: Format) -> Tensor:
    """All NaN codes as one: payloads and signs of NaN are policy."""
    magnitude = codes.int() & ((1 << (fmt.bits - 1)) - 1)
    nan = magnitude > (fmt.max_code if fmt.overflow_code in (fmt.nan_code, fmt.max_code) else fmt.overflow_code)
    return torch.where(nan, -1, codes.int())


@pytest.mark.parametrize("fmt", SIGNED, ids=lambda f: f.name)
def test_every_code_decodes_and_encodes_back(fmt: Format) -> None:
    codes = torch.arange(1 << fmt.bits, dtype=torch.int32)
    value = decode(codes, fmt)
    finite = ~value.isnan()
    assert_same(encode(value[finite], fmt, saturate=False), codes[finite], value[finite])


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        (E4M3, ml_dtypes.float8_e4m3fn),
        (E5M2, ml_dtypes.float8_e5m2),
        (E8M0, ml_dtypes.float8_e8m0fnu),
        (BF16, ml_dtypes.bfloat16),
        (FP16, np.float16),
    ],
)
def test_every_code_decodes_to_the_value_of_ml_dtypes(fmt: Format, dtype: object) -> None:
    raw = np.arange(1 << fmt.bits, dtype=np.uint8 if fmt.bits == 8 else np.uint16)
    theirs = torch.from_numpy(raw.view(dtype).astype(np.float32))
    assert torch.equal(decode(torch.from_numpy(raw.astype(np.int32)), fmt).nan_to_num(7.5), theirs.nan_to_num(7.5))


def test_e2m1_and_e4m3_decode_to_the_oracle_values() -> None:
    assert [Fraction(v) for v in decode(torch.arange(8), E2M1).tolist()] == list(oracle.E2M1_GRID)
    assert [Fraction(v) for v in decode(torch.arange(127), E4M3).tolist()] == [oracle.e4m3_value(c) for c in range(127)]


def test_tf32_decodes_as_the_fp32_number_whose_upper_bits_it_is() -> None:
    codes = torch.arange(1 << 19, dtype=torch.int32)
    fp32 = (codes << 13).view(torch.float32)
    assert torch.equal(decode(codes, TF32).nan_to_num(7.5), fp32.nan_to_num(7.5))


def test_tf32_rounding_toward_zero_is_dropping_13_bits() -> None:
    x = torch.cat([torch.randn(4096), torch.tensor([1e-40, -1e-45, torch.inf, -0.0, torch.finfo(torch.float32).max])])
    dropped = (x.view(torch.int32) >> 13) & 0x7FFFF
    assert_same(encode(x, TF32, saturate=False, rounding="rz"), dropped, x)


def test_ue4m3_ignores_the_sign_bit_as_the_tensor_core_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    value = decode(codes, UE4M3)
    assert torch.equal(value[:128].nan_to_num(7.5), value[128:].nan_to_num(7.5))
    assert value[0x7F].isnan() and value[0xFF].isnan()
    assert encode(torch.tensor([-2.0, 2.0]), UE4M3).tolist() == [0x40, 0x40]


@given(float32_bits(finite=False))
def test_the_short_cut_is_the_definition_on_any_float32(value: float) -> None:
    x = torch.tensor([value])
    for fmt in (E2M1, E4M3):
        assert encode(x, fmt).tolist() == by_definition(x, fmt).tolist()


@pytest.mark.parametrize("fmt", SMALL, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_short_cut_is_the_definition_on_every_16_bit_pattern_and_boundary(fmt: Format, dtype: torch.dtype) -> None:
    x = boundaries(fmt) if dtype == torch.float32 else patterns16(dtype)
    assert_same(formats._encode_bits(x.float(), fmt), by_definition(x, fmt), x.float())


@given(float32_bits())
def test_saturating_codes_are_the_oracle_on_any_finite_float32(value: float) -> None:
    x = torch.tensor([value])
    magnitude = abs(Fraction(value))
    assert int(encode(x, E2M1)) & 7 == oracle.e2m1_code(magnitude)
    assert int(encode(x, E4M3)) & 127 == oracle.e4m3_code(magnitude)


def test_e2m1_takes_nan_to_plus_six_and_keeps_the_sign_of_zero() -> None:
    x = torch.tensor([torch.nan, -torch.nan, -0.0, -1e-30, torch.inf, -torch.inf, 5.0, 5.0000005])
    assert encode(x, E2M1).tolist() == [7, 7, 8, 8, 7, 15, 6, 7]


def test_rounding_toward_zero_never_overflows_a_finite_number() -> None:
    x = torch.tensor([1e30, -1e30, torch.inf])
    assert encode(x, E4M3, saturate=False, rounding="rz").tolist() == [0x7E, 0xFE, 0x7F]
    assert encode(x, E5M2, saturate=False, rounding="rz").tolist() == [0x7B, 0xFB, 0x7C]


def test_e8m0_rounds_up_or_down_as_cvt_rp_and_rz() -> None:
    x = torch.tensor([1.0, 1.0000001, 1.5, 1.9999999, 3e38])
    assert encode(x, E8M0, rounding="rp").tolist() == [127, 128, 128, 128, 254]
    assert encode(x, E8M0, rounding="rz").tolist() == [127, 127, 127, 127, 254]


@pytest.mark.parametrize("fmt", SMALL, ids=lambda f: f.name)
def test_stochastic_rounding_goes_up_for_exactly_the_share_of_bits_that_the_fraction_is(fmt: Format) -> None:
    """Between neighbours a < b, x = a + f (b - a) rounds to b for floor(256 f) of the 256 bit patterns; so does -x."""
    values = formats._magnitudes(fmt)[: fmt.max_code + 1]
    bits = torch.arange(256)
    for eighths in (1, 3, 7, 7.99):
        f = eighths / 8
        for low in range(0, fmt.max_code, 7):
            x = (values[low].double() + f * (values[low + 1] - values[low]).double()).float()
            exact = float((x.double() - values[low]) / (values[low + 1] - values[low]).double())
            for sign, bit in ((1.0, 0), (-1.0, 1 << (fmt.bits - 1))):
                codes = encode((sign * x).expand(256), fmt, rounding="rs", random_bits=bits)
                ups = (codes == bit | (low + 1)).sum().item()
                assert ups == int(256 * exact) and (codes == bit | low).sum() == 256 - ups


def test_stochastic_rounding_is_gfloat_with_the_same_bits() -> None:
    x = boundaries(E2M1)
    x = x[x.isfinite() & (x.abs() <= 6)].double()
    bits = torch.arange(len(x)) * 37 % 256
    theirs = round_ndarray(
        gfloat_formats.format_info_ocp_e2m1, x.numpy(), RoundMode.StochasticFastest, True, bits.numpy(), 8
    )
    ours = decode(encode(x.float(), E2M1, rounding="rs", random_bits=bits), E2M1)
    assert torch.equal(ours.double(), torch.from_numpy(theirs))


def test_stochastic_rounding_needs_its_bits_and_no_other_rounding_takes_them() -> None:
    x = torch.ones(2)
    with pytest.raises(ValueError, match="random_bits go with rounding 'rs'"):
        encode(x, E2M1, rounding="rs")
    with pytest.raises(ValueError, match="random_bits go with rounding 'rs'"):
        encode(x, E2M1, random_bits=torch.zeros(2))
    with pytest.raises(ValueError, match=r"outside \[0, 2\^8\)"):
        encode(x, E2M1, rounding="rs", random_bits=torch.tensor([0, 256]))
    with pytest.raises(ValueError, match="'up' is not one of"):
        encode(x, E2M1, rounding="up")  # type: ignore[arg-type]
