"""Dialects as data: directed vectors of the differences between them, fields that all matter, and rcp dependence."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quads.emulation import dialects, formats, reciprocal
from quads.emulation.dialects import Dialect, load
from quads.emulation.quantizers import decided, dequantize, outer_scale, quantize, trace
from tests.blocks import amax_row, bfloat16_binade, block_maxima, blocks_at_ties


def bf16(value: float) -> float:
    return float(torch.tensor(value).bfloat16())


def block(*values: float) -> Tensor:
    return torch.tensor([[*values, *[0.0] * (16 - len(values))]])


def scale_byte(dialect: str | Dialect, amax: float, v: float) -> int:
    """Scale byte of a block of maximum v in a bf16 tensor of largest magnitude amax."""
    x = torch.cat([amax_row(amax, torch.bfloat16), block(v).bfloat16()])
    return int(quantize(x, dialect=load(dialect).replace(reciprocal="exact")).scales[1, 0])


ZERO_BLOCK = {"exact": 0x00, "vllm_kernel": 0x00, "te": 0x00, "flashinfer_fast": 0x00, "fouroversix_six": 0x00}
ZERO_BLOCK |= {"torchao_two_level": 0x08, "mslk": 0x01, "compressed_tensors": 0x20, "modelopt": 0x38}


@pytest.mark.parametrize(("name", "byte"), ZERO_BLOCK.items())
def test_a_zero_block_has_the_scale_byte_of_its_dialect_and_zero_codes(name: str, byte: int) -> None:
    x = torch.cat([amax_row(2.5, torch.float32), block()])
    q = quantize(x, dialect=name)
    assert q.scales[1, 0] == byte
    assert not q.codes[1].any()


UNDERFLOW = {
    "exact": (0x00, [0, 8, 0, 0]),
    "vllm_kernel": (0x00, [0, 8, 0, 0]),
    "flashinfer_fast": (0x00, [7, 15, 7, 7]),
    "flashinfer_exact": (0x00, [7, 15, 0, 7]),
    "te": (0x00, [7, 15, 0, 7]),
    "torchao_two_level": (0x08, [1, 9, 0, 0]),
    "mslk": (0x01, [5, 13, 0, 1]),
    "modelopt": (0x01, [5, 13, 0, 1]),
    "compressed_tensors": (0x20, [0, 8, 0, 0]),
    "fouroversix_six": (0x00, [0, 0, 0, 0]),  # its PyTorch path; numerics page B2 has the kernel's 0 8 0 0
}


@pytest.mark.parametrize(("name", "expected"), UNDERFLOW.items())
def test_a_block_that_underflows_its_scale(name: str, expected: tuple[int, list[int]]) -> None:
    q = quantize(block(bf16(0.005), -bf16(0.005), 0.0, bf16(0.001)), torch.tensor(1.0), dialect=name)
    assert (q.scales.item(), q.codes[0, :4].tolist()) == expected


def test_a_scale_rounds_to_zero_up_to_and_including_half_the_smallest_step() -> None:
    at = 6 * 2.0**-10
    for v, byte in ((at, 0x00), (at * (1 + 2.0**-7), 0x01)):
        assert quantize(block(v), torch.tensor(1.0)).scales.item() == byte


ASSOCIATION = [
    ("vllm_kernel", "te", 2.03125, 0.005950927734375, 0x3A, 0x3B),
    ("vllm_kernel", "fouroversix_six", 2.1875, 0.004425048828125, 0x37, 0x36),
    ("torchao_two_level", "modelopt", 2.1875, 0.00762939453125, 0x3D, 0x3C),
    ("mslk", "torchao_two_level", 2.1875, 0.00518798828125, 0x39, 0x38),
]


@pytest.mark.parametrize(("first", "second", "amax", "v", "byte", "other"), ASSOCIATION)
def test_the_order_of_the_scale_product_shows(
    first: str, second: str, amax: float, v: float, byte: int, other: int
) -> None:
    assert (scale_byte(first, amax, v), scale_byte(second, amax, v)) == (byte, other)


@pytest.mark.parametrize(
    ("amax", "v", "ulps", "before", "after"),
    [(2.0, 0.005859375, 1, 0x3A, 0x3B), (2.1875, 0.004119873046875, -1, 0x36, 0x35)],
)
def test_a_reciprocal_of_six_that_is_off_by_an_ulp_shows(
    amax: float, v: float, ulps: int, before: int, after: int
) -> None:
    x = torch.cat([amax_row(amax, torch.float32), block(v)])
    scales = [
        trace(x, dialect="vllm_kernel", rcp=reciprocal.Reciprocal(six=n)).result.scales[1, 0].item() for n in (0, ulps)
    ]
    assert scales == [before, after]


def test_rounding_to_bfloat16_before_fp4_moves_codes() -> None:
    """Step 1 exactly: 0.2501 is 1 in one rounding and 0 in two."""
    x = block(0.2501, 0.7499, 2.501, 5.001, 6.0)
    outer = torch.tensor(1.0)
    assert quantize(x, outer).codes[0, :4].tolist() == [1, 1, 5, 7]
    double = load("exact").replace(name="bf16 first", pre_round="bf16")
    assert quantize(x, outer, dialect=double).codes[0, :4].tolist() == [0, 2, 4, 6]


def test_compressed_tensors_derives_its_divisor_in_the_dtype_of_the_tensor() -> None:
    x = amax_row(2.03125, torch.bfloat16)
    assert outer_scale(x, dialect="compressed_tensors").item() == 1320.0
    assert outer_scale(x.float(), dialect="compressed_tensors").item() != 1320.0


def test_compressed_tensors_multiplies_by_a_reciprocal_where_it_writes_a_division() -> None:
    """`number / tensor` is number * (1 / tensor) in torch: two roundings, another divisor for A = 2.5."""
    x = amax_row(2.5, torch.float32)
    divided = load("compressed_tensors").replace(name="divided", outer="max/amax")
    assert outer_scale(x, dialect="compressed_tensors").item().hex() == "0x1.0cccce0000000p+10"
    assert outer_scale(x, dialect=divided).item().hex() == "0x1.0ccccc0000000p+10"


@pytest.mark.parametrize(("name", "code"), [("vllm_kernel", 8), ("te", 8), ("modelopt", 0), ("te_reference", 0)])
def test_negative_zero(name: str, code: int) -> None:
    q = quantize(block(1.0, -0.0, -1e-6), dialect=name)
    assert q.codes[0, 1:3].tolist() == [code, 8]


def test_a_scale_beyond_448_saturates() -> None:
    x = block(480 / 448 * 2688.0)
    assert quantize(x, torch.tensor(1.0), dialect="vllm_kernel").scales.item() == 0x7E


def test_fouroversix_wraps_a_small_blocks_maximum_to_minus_zero() -> None:
    """Its PyTorch path has no clamp: where rounding a subnormal scale makes y >= 7, 8 becomes code 8."""
    x = torch.cat([amax_row(2.0, torch.bfloat16), block(2.1696090698242188e-05).bfloat16()])
    assert trace(x, dialect="fouroversix_six").steps["y"][1, 0, 0] > 7
    assert quantize(x, dialect="fouroversix_six").codes[1, 0] == 8


def test_a_kernel_ignores_nan_in_maxima_and_stores_it_as_six() -> None:
    q = quantize(block(torch.nan, 3.0, -6.0), torch.tensor(1.0), dialect="vllm_kernel")
    assert q.scales.item() == 0x38
    assert q.codes[0, :3].tolist() == [7, 5, 15]


def test_fast_math_flushes_subnormal_input() -> None:
    x = block(1e-39, -1e-39)
    gs = torch.tensor(2.0**126)
    assert quantize(x, gs, dialect="flashinfer_fast").scales.item() == 0
    assert quantize(x, gs, dialect="vllm_kernel").scales.item() > 0


def tied(d: Dialect, amaxes: list[float]) -> list[Tensor]:
    tensors = []
    for amax in amaxes:
        v = block_maxima(amax)
        x = torch.zeros(len(v) + 1, 16)
        x[0, 5], x[1:, 0] = -amax, v.float()
        q = quantize(x, dialect=d.replace(tile="1x16", granularity="tensor"))
        step = (formats.decode(q.scales, formats.E4M3) * q.outer)[1:, 0]
        ties = blocks_at_ties(v, torch.where(step > 0, step, 1.0), torch.bfloat16)
        tensors.append(torch.cat([amax_row(amax, torch.bfloat16), ties]))
    return tensors


@pytest.mark.parametrize("field", ["scale", "multiplier"])
def test_every_association_differs_from_every_other_on_enumerated_blocks(field: str) -> None:
    base = load("vllm_kernel").replace(reciprocal="exact", underflow="zero_scale")
    choices = dialects.CHOICES[field]
    forms = [base.replace(name=str(form), **{field: form}) for form in choices]
    tensors = [t for form in forms[:2] for t in tied(form, bfloat16_binade()[1::4])]
    seen: dict[bytes, str] = {}
    for form in forms:
        parts = [quantize(t, dialect=form) for t in tensors]
        key = b"".join(p.codes.numpy().tobytes() + p.scales.numpy().tobytes() for p in parts)
        assert key not in seen, f"{form.name} equals {seen[key]}"
        seen[key] = form.name


def test_gaussian_blocks_cannot_tell_the_dialects_apart() -> None:
    """Why this file enumerates: 20,000 random blocks see none of it."""
    torch.manual_seed(0)
    x = torch.randn(20_000, 16).bfloat16().clamp(-5, 5)
    x[0, 0] = 5.34375
    names = ["vllm_kernel", "te_reference", "torchao_two_level", "modelopt"]
    scales = [quantize(x, dialect=name).scales for name in names]
    assert all(torch.equal(scales[0], other) for other in scales[1:])


def test_decided_is_true_everywhere_for_exact_arithmetic() -> None:
    mask = decided(torch.randn(4, 32), dialect="exact")
    assert mask.codes.all() and mask.scales.all()


def test_an_element_at_a_tie_depends_on_rcp_and_one_far_from_it_does_not() -> None:
    """gs = 1 and s = 1: the multiplier is rcp(rcp(1)), so 0.75 sits on a tie and 0.9 does not."""
    mask = decided(block(6.0, 0.75, 0.9), torch.tensor(1.0), dialect="vllm_kernel")
    assert mask.codes[0, :3].tolist() == [True, False, True]
    assert mask.scales.all()


def test_a_block_scale_at_a_tie_depends_on_rcp() -> None:
    x = torch.cat([amax_row(2.0, torch.float32), block(0.005859375)])
    assert decided(x, dialect="vllm_kernel").scales[:, 0].tolist() == [True, False]


def test_what_is_decided_is_what_every_reciprocal_within_an_ulp_gives() -> None:
    torch.manual_seed(1)
    d = load("vllm_kernel")
    for x in tied(d, [2.1875, 3.140625]):
        mask = decided(x, dialect=d)
        assert 0 < (~mask.codes).sum() < x.numel() and 0 < (~mask.scales).sum() < mask.scales.numel()
        reference = quantize(x, dialect=d)
        for _ in range(4):
            ulps = torch.randint(-1, 2, (3,)).tolist()
            rcp = reciprocal.Reciprocal(six=ulps[0], outer=ulps[1], multiplier=ulps[2])
            other = trace(x, dialect=d, rcp=rcp).result
            assert torch.equal(other.codes[mask.codes], reference.codes[mask.codes])
            assert torch.equal(other.scales[mask.scales], reference.scales[mask.scales])


def test_inverting_a_stored_divisor_twice_does_not_return_it() -> None:
    x = (torch.arange(1 << 23, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    assert ((1.0 / (1.0 / x)) != x).sum().item() == 1_439_258


@pytest.mark.parametrize("name", list(dialects.named()))
def test_every_named_dialect_quantises_and_comes_back_near_its_input(name: str) -> None:
    torch.manual_seed(2)
    x = torch.randn(32, 64)
    x = x / x.abs().amax() * (2688.0 if load(name).outer == "one" else 3.0)
    back = dequantize(quantize(x, dialect=name))
    assert (back - x).norm() < 0.13 * x.norm()


def test_the_record_of_a_dialect_enumerates_every_field_but_its_words() -> None:
    fields = {field.name for field in dataclasses.fields(Dialect)}
    assert fields - set(dialects.CHOICES) == {"name", "source"}


def test_an_unknown_name_field_or_value_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="no dialect named 'vllm_kernal'; did you mean 'vllm_kernel'"):
        load("vllm_kernal")
    with pytest.raises(ValueError, match="field 'scael' is unknown; did you mean scale"):
        dialects._from_table("mine", {"like": "exact", "scael": "v/6/g"}, {"exact": dialects.EXACT})
    with pytest.raises(ValueError, match=r"dialect 'mine': rule = 'rms' is not one of six, mse, mae, abs_max"):
        dialects.EXACT.replace(name="mine", rule="rms")
    with pytest.raises(ValueError, match="16x16 tile spans rows"):
        dialects.EXACT.replace(name="mine", tile="16x16", granularity="token")


def test_a_dialect_that_weighs_errors_by_amax_takes_no_outer_scale() -> None:
    with pytest.raises(ValueError, match="'fouroversix_mse' weighs its error by amax"):
        quantize(torch.ones(1, 16), torch.tensor(1.0), dialect="fouroversix_mse")


def test_the_page_on_dialects_lists_each_one_under_its_evidence() -> None:
    page = (Path(__file__).parents[2] / "docs" / "dialects.md").read_text("utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    listed = {name: row[3].strip() for row in rows for name in re.findall("`([a-z0-9_]+)`", row[1])}
    assert listed == {name: d.evidence for name, d in dialects.named().items()}


@pytest.mark.parametrize("name", ["modelopt", "torchao_two_level"])
def test_a_zero_tensor_has_nan_scales_where_amax_is_not_guarded(name: str) -> None:
    assert (quantize(torch.zeros(1, 16), dialect=name).scales & 0x7F).item() == 0x7F
