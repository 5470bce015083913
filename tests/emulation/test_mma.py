"""The fused step against exact rationals; first, that the data tells the plausible wrong models apart."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from quads.emulation import fdpa, mma
from tests import oracle_mma
from tests.mma_data import fp4_pairs, random_codes, signed, unsigned, window_codes

NVFP4 = mma.model("nvfp4")


def fp4_oracle(a: mma.Operand, b: mma.Operand, c: Tensor, rules: oracle_mma.Rules) -> list[int]:
    assert a.scales is not None and b.scales is not None
    rows = zip(a.codes.tolist(), b.codes.tolist(), a.scales.tolist(), b.scales.tolist(), unsigned(c), strict=True)
    return [
        oracle_mma.fused_step(
            oracle_mma.terms_of_groups(x[0], y[0], list(zip(s[0], t[0], strict=True)), rules), word, rules
        )
        for x, y, s, t, word in rows
    ]


@pytest.fixture(scope="module")
def fp4_case() -> tuple[mma.Operand, mma.Operand, Tensor]:
    return fp4_pairs(1500, seed=0)


@pytest.mark.parametrize("bits", [25, 34, 36])
def test_the_fp4_data_tells_other_fraction_bits_apart(fp4_case: tuple, bits: int) -> None:
    a, b, c = fp4_case
    assert (mma.chain(a, b, NVFP4.replace(fraction_bits=bits), c) != mma.chain(a, b, NVFP4, c)).any()


def test_the_fp4_data_tells_round_to_nearest_apart(fp4_case: tuple) -> None:
    a, b, c = fp4_case
    nearest = dataclasses.replace(oracle_mma.NVFP4, round_sum=oracle_mma.rn_fp32)
    assert fp4_oracle(a, b, c, nearest) != unsigned(mma.chain(a, b, NVFP4, c))


def test_the_fp4_step_is_the_rational_model_on_random_codes_scales_and_c(fp4_case: tuple) -> None:
    a, b, c = fp4_case
    assert unsigned(mma.chain(a, b, NVFP4, c)) == fp4_oracle(a, b, c, oracle_mma.NVFP4)


def sparse_fp4(count: int, seed: int) -> tuple[mma.Operand, mma.Operand, Tensor]:
    """Steps full of dead and cancelled groups with large scales, and C so small that they would hide it."""
    a, b, c = fp4_pairs(count, seed)
    g = torch.Generator().manual_seed(seed)
    keep = torch.randint(0, 3, (count, 1, 4), generator=g).repeat_interleave(16, -1)
    codes = torch.where(keep == 0, 0, a.codes)
    pattern = torch.tensor([2, 10] * 32).expand_as(codes)  # 1, -1: cancels against equal codes
    ones = torch.full_like(codes, 2)
    a = mma.Operand(torch.where(keep == 1, pattern, codes), a.scales)
    b = mma.Operand(torch.where(keep == 1, ones, b.codes), b.scales)
    tiny = (c.long() & 0x007FFFFF) | ((127 + torch.randint(-26, -16, c.shape, generator=g)) << 23)
    return a, b, signed(tiny, 32)


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        ({}, {}),
        ({"dead_group": "included"}, {"dead_excluded": False}),
        ({"cancelled_group": "excluded"}, {"cancelled_included": False}),
    ],
    ids=["default", "dead included", "cancelled excluded"],
)
def test_dead_and_cancelled_groups_follow_the_chosen_rule(change: dict, rules: dict) -> None:
    a, b, c = sparse_fp4(400, seed=1)
    got = mma.chain(a, b, NVFP4.replace(**change), c)
    if change:
        assert (got != mma.chain(a, b, NVFP4, c)).any(), "the data does not exercise the rule"
    assert unsigned(got) == fp4_oracle(a, b, c, dataclasses.replace(oracle_mma.NVFP4, **rules))


@pytest.mark.parametrize(("name", "block"), [("mxf4_block16", 16), ("mxf4", 32)])
def test_power_of_two_scales_cover_their_block_of_groups(name: str, block: int) -> None:
    g = torch.Generator().manual_seed(2)
    a, b, c = fp4_pairs(200, seed=2)
    scales = [127 + torch.randint(-18, 19, (200, 1, 64 // block), generator=g) for _ in range(2)]
    got = mma.chain(mma.Operand(a.codes, scales[0]), mma.Operand(b.codes, scales[1]), mma.model(name), c)
    repeated = [s.repeat_interleave(block // 16, -1) for s in scales]
    for i, word in enumerate(unsigned(got)):
        pairs = list(zip(repeated[0][i, 0].tolist(), repeated[1][i, 0].tolist(), strict=True))
        terms = oracle_mma.terms_of_groups(
            a.codes[i, 0].tolist(), b.codes[i, 0].tolist(), pairs, oracle_mma.NVFP4, oracle_mma.ue8m0
        )
        assert word == oracle_mma.fused_step(terms, unsigned(c[i])[0], oracle_mma.NVFP4)


def product_case(name: str, count: int) -> tuple[mma.Operand, mma.Operand, Tensor, str]:
    rules, operand, k, container = oracle_mma.TABLE[name]
    g = torch.Generator().manual_seed(3)
    codes = [window_codes((count, 1, k), operand, 5, g) for _ in range(2)]
    c = window_codes((count, 1, 1), container, 8, g)
    if container == "fp16" and rules.fraction_bits == 25:
        _cancel(codes, operand)
        c = c & 0x8FFF
    a, b = (mma.Operand(x, None, operand) for x in codes)
    return a, b, signed(c, 32 if container == "fp32" else 16), container


def _cancel(codes: list[Tensor], operand: str) -> None:
    """Let all products but the last two cancel in pairs: FP16 results show truncation only where little is left."""
    sign, half = 1 << (fdpa.FIELDS[operand].bits - 1), codes[0].shape[-1] // 2
    codes[0][..., half:-2] = codes[0][..., : half - 2] ^ sign
    codes[1][..., half:-2] = codes[1][..., : half - 2]
    for x in codes:
        x[..., half - 2 : half] = 0
        x[..., -2:] = (x[..., -2:] & ~(0x7 << fdpa.FIELDS[operand].mantissa_bits + 2)) | sign


@pytest.mark.parametrize("name", oracle_mma.TABLE)
def test_the_product_step_is_the_rational_model_and_its_neighbours_are_not(name: str) -> None:
    a, b, c, container = product_case(name, 150)
    rules, operand, _, _ = oracle_mma.TABLE[name]
    row = mma.model(name)
    got = mma.chain(a, b, row, c)
    for bits in (row.fraction_bits - 2, row.fraction_bits + 2):
        assert (mma.chain(a, b, row.replace(fraction_bits=bits), c) != got).any(), "the data cannot tell F apart"
    words = zip(a.codes.tolist(), b.codes.tolist(), unsigned(c), strict=True)
    expected = [
        oracle_mma.fused_step(oracle_mma.terms_of_products(x[0], y[0], operand, rules), word, rules, container)
        for x, y, word in words
    ]
    assert unsigned(got) == expected


def test_a_block_scale_adds_its_exponent_to_every_product_of_mxf8f6f4() -> None:
    g = torch.Generator().manual_seed(4)
    row = mma.model("mxf8f6f4")
    codes = [window_codes((100, 1, 32), "e4m3", 4, g) for _ in range(2)]
    scales = [127 + torch.randint(-9, 10, (100, 1, 1), generator=g) for _ in range(2)]
    c = signed(window_codes((100, 1, 1), "fp32", 20, g), 32)
    a, b = (mma.Operand(x, s, "e4m3") for x, s in zip(codes, scales, strict=True))
    got = mma.chain(a, b, row, c)
    rules = oracle_mma.Rules(1, 25, -133, oracle_mma.rz_fp32)
    for i, word in enumerate(unsigned(got)):
        shift = int(scales[0][i] + scales[1][i]) - 254
        plain = oracle_mma.terms_of_products(codes[0][i, 0].tolist(), codes[1][i, 0].tolist(), "e4m3", rules)
        terms = [(s, e + shift if s else e) for s, e in plain]
        assert word == oracle_mma.fused_step(terms, unsigned(c[i])[0], rules)


def test_a_chain_takes_its_steps_in_ascending_k_and_no_other_order() -> None:
    a, b, _ = fp4_pairs(400, seed=5)
    long_a, long_b = (
        mma.Operand(x.codes.view(100, 1, 256), x.scales.view(100, 1, 16)) for x in (a, b) if x.scales is not None
    )
    parts = [(long_a.chunk(s, s + 64, 16), long_b.chunk(s, s + 64, 16)) for s in range(0, 256, 64)]
    ascending = descending = torch.zeros(100, 1, 1, dtype=torch.int32)
    for x, y in parts:
        ascending = mma.step(x, y, ascending, NVFP4)
    for x, y in reversed(parts):
        descending = mma.step(x, y, descending, NVFP4)
    assert (ascending != descending).any(), "the data cannot tell the orders apart"
    assert torch.equal(mma.chain(long_a, long_b, NVFP4), ascending)


def test_splitting_the_rows_of_a_large_problem_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(6)
    a, b = (
        mma.Operand(random_codes((9, 128), "e2m1", g), torch.randint(0, 127, (9, 8), generator=g)) for _ in range(2)
    )
    whole = mma.chain(a, b, NVFP4)
    monkeypatch.setattr(mma, "_MAX_TERMS", 1)
    assert torch.equal(mma.chain(a, b, NVFP4), whole)


def test_sums_of_subnormal_size_are_kept_and_truncated() -> None:
    x = torch.tensor([[1.5 * 2.0**-70] + [0.0] * 15]).bfloat16()
    y = torch.tensor([[1.75 * 2.0**-70] + [0.0] * 15]).bfloat16()
    got = mma.chain(mma.floating(x), mma.floating(y), mma.model("wgmma_f16"))
    assert got.item() == int(1.5 * 1.75 * 2.0**-140 * 2.0**149)


def test_overflow_gives_infinity_and_stays() -> None:
    big = mma.floating(torch.full((1, 32), 3e38).bfloat16())
    small = mma.floating(torch.full((1, 32), -3e38).bfloat16())
    assert mma.chain(big, big, mma.model("wgmma_f16")).item() == 0x7F800000
    assert mma.chain(big, small, mma.model("wgmma_f16")).item() == 0xFF800000 - (1 << 32)


def test_infinity_times_zero_is_the_canonical_nan() -> None:
    inf, zero = torch.tensor([[torch.inf] + [0.0] * 15]).half(), torch.zeros(1, 16).half()
    assert mma.chain(mma.floating(inf), mma.floating(zero), mma.model("wgmma_f16")).item() == 0x7FFFFFFF
    assert mma.chain(mma.floating(inf), mma.floating(zero), mma.model("wgmma_f16_f16")).item() == 0x7FFF


def test_every_row_of_the_table_is_complete() -> None:
    for row in mma.models().values():
        assert row.output in fdpa.OUTPUTS and set(row.operands) <= set(fdpa.FIELDS)
        assert row.k % row.group == 0 and row.fraction_bits in (13, 23, 24, 25, 35)
        assert (row.scale == "none") == (row.scale_block == 0)


CODES = torch.zeros(2, 64, dtype=torch.uint8)
SCALES = torch.zeros(2, 4, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("a", "b", "name", "message"),
    [
        (mma.Operand(CODES, SCALES, "e4m3"), mma.Operand(CODES, SCALES), "nvfp4", "a is e4m3: nvfp4 takes e2m1"),
        (mma.Operand(CODES.float(), SCALES), mma.Operand(CODES, SCALES), "nvfp4", "a codes have dtype torch.float32"),
        (mma.Operand(CODES, SCALES), mma.Operand(CODES[:0], SCALES[:0]), "nvfp4", r"b codes of shape \(0, 64\)"),
        (mma.Operand(CODES, None), mma.Operand(CODES, SCALES), "nvfp4", "a scales: nvfp4 takes ue4m3 block scales"),
        (mma.Operand(CODES, SCALES), mma.Operand(CODES, SCALES), "wgmma_fp8", "a is e2m1: wgmma_fp8 takes"),
        (mma.Operand(CODES[:, :40], SCALES), mma.Operand(CODES, SCALES), "nvfp4", "K is not a multiple of 16"),
        (mma.Operand(CODES, SCALES[:, :3]), mma.Operand(CODES, SCALES), "nvfp4", r"a scales of shape \(2, 3\)"),
        (
            mma.Operand(CODES[:, :48], SCALES[:, :3]),
            mma.Operand(CODES, SCALES),
            "nvfp4",
            "K differs: a has 48, b has 64",
        ),
    ],
)
def test_bad_operands_are_named_with_their_rule(a: mma.Operand, b: mma.Operand, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mma.chain(a, b, mma.model(name))


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no tensor-core model named 'nvfp5' \(known: nvfp4, "):
        mma.model("nvfp5")


def test_an_operand_of_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"operand of dtype torch.float64: expected one of torch.bfloat16"):
        mma.floating(torch.zeros(1, 16, dtype=torch.float64))
