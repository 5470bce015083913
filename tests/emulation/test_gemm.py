"""The matrix product at speed equals the step model bit for bit; epilogue, split-K, RAC and whole layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quads.emulation import chain_cpu, exact_chain, gemm, mma, residual, undecided
from quads.emulation.quantizers import NVFP4Tensor, dequantize, quantize, unscaled

NVFP4 = gemm.NVFP4


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def raw(rows: int, k: int, seed: int, lowest: int = 0, highest: int = 0x7E, dead: float = 0.0) -> NVFP4Tensor:
    """Random codes and scale bytes, scales in [lowest, highest] with random signs; a share of the groups dead."""
    g = torch.Generator().manual_seed(seed)
    scales = torch.randint(lowest, highest + 1, (rows, k // 16), generator=g)
    scales |= torch.randint(0, 2, scales.shape, generator=g) << 7
    codes = torch.randint(0, 16, (rows, k), generator=g)
    off = (torch.rand(rows, k // 16, generator=g) < dead).repeat_interleave(16, -1)
    return NVFP4Tensor(torch.where(off, 0, codes).to(torch.uint8), scales.to(torch.uint8), torch.tensor(1.0))


def spread(rows: int, k: int, sigma: float, seed: int) -> NVFP4Tensor:
    """A quantised Gaussian whose blocks are scaled log-normally: order and rounding show, unlike in plain Gaussians."""
    g = torch.Generator().manual_seed(seed)
    factor = torch.exp(sigma * torch.randn(rows, k // 16, generator=g)).repeat_interleave(16, -1)
    return quantize(torch.randn(rows, k, generator=g) * factor, granularity="token")


def slow(a: NVFP4Tensor, b: NVFP4Tensor, model: mma.Model = NVFP4) -> Tensor:
    return mma.chain(mma.Operand(a.codes, a.scales), mma.Operand(b.codes, b.scales), model)


def decoded(q: NVFP4Tensor) -> exact_chain.Decoded:
    return exact_chain.decode(exact_chain.padded(mma.Operand(q.codes, q.scales)))


CASES = {  # data, the path it must take
    "unrounded": (spread(40, 64, 0.0, 1), spread(24, 64, 0.0, 2)),
    "unrounded, K = 16": (raw(40, 16, 1, 0x30, 0x3F), raw(24, 16, 2, 0x30, 0x3F)),
    "lossless": (spread(40, 1024, 0.0, 3), spread(24, 1024, 0.0, 4)),
    "lossless, spread blocks": (spread(40, 512, 1.0, 5), spread(24, 512, 1.0, 6)),
    "lossless, K = 1040": (spread(9, 1040, 0.5, 5), spread(7, 1040, 0.5, 6)),
    "truncating, raw scales": (raw(64, 1024, 7), raw(64, 1024, 8)),
    "truncating, half dead": (raw(40, 512, 9, dead=0.5), raw(24, 512, 10, dead=0.5)),
    "truncating, spread blocks": (spread(40, 1024, 2.0, 11), spread(24, 1024, 2.0, 12)),
    "truncating, K = 80": (raw(40, 80, 13), raw(24, 80, 14)),
    "truncating, one row": (raw(1, 2048, 15), raw(200, 2048, 16)),
}


@pytest.mark.parametrize("name", CASES)
def test_each_case_takes_the_path_that_it_names(name: str) -> None:
    a, b = CASES[name]
    assert name.startswith(exact_chain.path(decoded(a), decoded(b), NVFP4))


@pytest.mark.parametrize("name", CASES)
def test_matmul_is_the_step_model_bit_for_bit(name: str) -> None:
    a, b = CASES[name]
    assert torch.equal(bits(gemm.matmul(a, b)), slow(a, b))


@pytest.mark.parametrize("change", [{"dead_group": "included"}, {"cancelled_group": "excluded"}, {"fraction_bits": 34}])
def test_matmul_follows_a_changed_rule_as_the_step_model_does(change: dict) -> None:
    other = NVFP4.replace(**change)
    for name in ("truncating, raw scales", "truncating, half dead"):
        a, b = CASES[name]
        assert torch.equal(bits(gemm.matmul(a, b, model=other)), slow(a, b, other))


def test_without_the_bound_the_lossless_path_would_be_wrong() -> None:
    """Raw scales at K = 2048 lose bits to the alignment: masking exact sums is not the hardware there."""
    a, b = raw(128, 2048, 17), raw(128, 2048, 18)
    masked = exact_chain._lossless(decoded(a).values, decoded(b).values)
    assert not torch.equal(bits(masked), slow(a, b))
    assert torch.equal(bits(gemm.matmul(a, b)), slow(a, b))


def test_without_a_compiler_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = CASES["truncating, half dead"]
    compiled = gemm.matmul(a, b)
    monkeypatch.setattr(chain_cpu, "library", lambda: None)
    assert torch.equal(bits(gemm.matmul(a, b)), bits(compiled))


def test_a_nan_scale_makes_its_row_and_column_nan_and_nothing_else() -> None:
    a, b = raw(6, 128, 21), raw(5, 128, 22)
    a.scales[2, 3], b.scales[4, 0] = 0x7F, 0xFF
    a.codes[2] = 0
    got = gemm.matmul(a, b)
    assert torch.equal(bits(got), slow(a, b))
    nan = got.isnan()
    assert bool(nan[2].all()) and bool(nan[:, 4].all()) and int(nan.sum()) == 5 + 6 - 1


def test_all_rows_nan_is_all_nan() -> None:
    a, b = raw(2, 64, 23), raw(3, 64, 24)
    a.scales[:] = 0x7F
    assert torch.equal(bits(gemm.matmul(a, b)), torch.full((2, 3), 0x7FFFFFFF, dtype=torch.int32))


def test_zero_codes_and_zero_scales_give_positive_zero() -> None:
    a, b = raw(2, 64, 25), raw(3, 64, 26)
    a.codes[0], a.scales[1] = 8, 0x80
    got = gemm.matmul(a, b)
    assert torch.equal(bits(got), torch.zeros(2, 3, dtype=torch.int32)) and torch.equal(bits(got), slow(a, b))


def test_row_tiles_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wholes = {name: gemm.matmul(*CASES[name]) for name in ("lossless", "truncating, raw scales")}
    monkeypatch.setattr(exact_chain, "_TILE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for name, whole in wholes.items():
        assert torch.equal(bits(gemm.matmul(*CASES[name])), bits(whole))


def test_a_prepared_weight_gives_the_same_bits() -> None:
    a, b = CASES["truncating, K = 80"]
    assert torch.equal(bits(gemm.matmul(a, gemm.prepare(b))), bits(gemm.matmul(a, b)))


def columns(q: NVFP4Tensor, start: int, stop: int) -> NVFP4Tensor:
    return NVFP4Tensor(q.codes[:, start:stop], q.scales[:, start // 16 : -(-stop // 16)], q.outer)


def test_split_k_adds_ascending_ranges_rounding_to_nearest() -> None:
    a, b = spread(40, 1024, 2.0, 31), spread(24, 1024, 2.0, 32)
    parts = [gemm.matmul(columns(a, i, i + 384), columns(b, i, i + 384)) for i in (0, 384, 768)]
    got = gemm.matmul(a, b, split_k=3)
    assert torch.equal(bits(got), bits((parts[0] + parts[1]) + parts[2]))
    assert not torch.equal(bits(got), bits(gemm.matmul(a, b))), "the data cannot tell split-K apart"


def test_alpha_multiplies_in_fp32_before_the_cast() -> None:
    acc = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    alpha = torch.tensor(0.0123)
    wrong = acc.bfloat16() * alpha.bfloat16()
    got = gemm.epilogue(acc, alpha)
    assert torch.equal(got, (acc.double() * alpha.double()).float().bfloat16())
    assert (got != wrong).float().mean() > 0.2


def test_alpha_per_token_row_scales_its_row() -> None:
    acc, alpha = torch.ones(3, 2), torch.tensor([[1.0], [2.0], [4.0]])
    assert gemm.epilogue(acc, alpha, torch.float16).tolist() == [[1, 1], [2, 2], [4, 4]]


@pytest.mark.parametrize("granularity", ["tensor", "token"])
def test_a_linear_layer_is_quantize_product_epilogue(granularity: str) -> None:
    g = torch.Generator().manual_seed(2)
    x, w = torch.randn(2, 3, 128, generator=g).bfloat16(), quantize(torch.randn(40, 128, generator=g))
    got = gemm.linear(x, w, granularity=granularity)  # type: ignore[arg-type]
    q = quantize(x.view(6, 128), granularity=granularity)  # type: ignore[arg-type]
    exact = unscaled(q).double() @ unscaled(w).double().T
    expected = (exact.float() * (q.outer * w.outer)).bfloat16()
    assert got.shape == (2, 3, 40) and torch.equal(got.view(6, 40), expected)


def rac_case() -> tuple[Tensor, NVFP4Tensor, NVFP4Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(12, 256, generator=g).bfloat16()
    q = quantize(x, granularity="token")
    scores = residual.block_scores(residual.residual(x, q), q.outer).sum(0)
    return x, quantize(torch.randn(24, 256, generator=g)), q, residual.top_blocks(scores, 5)


def test_rac_appends_the_residual_after_k_with_the_weights_own_codes() -> None:
    x, w, q, blocks = rac_case()
    extra = residual.quantize_residual(x, q, blocks)
    columns = torch.cat([torch.arange(16 * i, 16 * i + 16) for i in blocks.tolist()])
    a = NVFP4Tensor(torch.cat([q.codes, extra.codes], 1), torch.cat([q.scales, extra.scales], 1), q.outer)
    b = NVFP4Tensor(
        torch.cat([w.codes, w.codes[:, columns]], 1), torch.cat([w.scales, w.scales[:, blocks]], 1), w.outer
    )
    padded = -(256 + 80) % 64
    assert padded == 48
    zero = torch.nn.functional.pad
    long_a, long_b = (mma.Operand(zero(t.codes, (0, padded)), zero(t.scales, (0, padded // 16))) for t in (a, b))
    expected = gemm.epilogue(mma.chain(long_a, long_b, NVFP4).view(torch.float32), q.outer * w.outer)
    assert torch.equal(gemm.linear(x, w, rac_blocks=blocks), expected)


def test_rac_of_no_blocks_is_the_naive_product() -> None:
    x, w, _, _ = rac_case()
    none = torch.zeros(0, dtype=torch.int64)
    assert torch.equal(gemm.linear(x, w, rac_blocks=none), gemm.linear(x, w))


def test_rac_of_every_block_comes_closest_to_the_unquantized_activation() -> None:
    x, w, _, blocks = rac_case()
    target = x.float() @ dequantize(w).T
    errors = [
        float((gemm.linear(x, w, rac_blocks=b).float() - target).norm())
        for b in (torch.zeros(0, dtype=torch.int64), blocks, torch.arange(16))
    ]
    assert errors[0] > errors[1] > 5 * errors[2]


GOOD = raw(2, 64, 0)


@pytest.mark.parametrize(
    ("codes", "scales", "message"),
    [
        (raw(2, 128, 0).codes, raw(2, 128, 0).scales, "K differs: a has 128, b has 64"),
        (GOOD.codes[:0], GOOD.scales[:0], r"a codes of shape \(0, 64\): expected non-empty"),
        (GOOD.codes[:, :24], GOOD.scales, r"shape \(2, 24\): K is not a multiple of 16"),
        (GOOD.codes, GOOD.scales[:, :3], r"scales of shape \(2, 3\) .* one scale per 16"),
        (GOOD.codes[None], GOOD.scales[None], r"codes of shape \(1, 2, 64\): expected \[rows, K\]"),
        (GOOD.codes.float(), GOOD.scales, "codes have dtype torch.float32"),
    ],
)
def test_bad_matrices_are_named_with_their_rule(codes: Tensor, scales: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gemm.matmul(NVFP4Tensor(codes, scales, torch.tensor(1.0)), GOOD)


def test_a_model_of_other_scales_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model mxf4 is no variant of nvfp4: use mma.chain"):
        gemm.matmul(GOOD, GOOD, model=mma.model("mxf4"))


@pytest.mark.parametrize("split_k", [0, 3])
def test_split_k_outside_the_steps_is_refused(split_k: int) -> None:
    with pytest.raises(ValueError, match=rf"split_k = {split_k} is not between 1 and the 2 steps of 64 in K"):
        gemm.matmul(raw(2, 128, 0), raw(3, 128, 0), split_k=split_k)


def test_non_contiguous_operands_give_the_same_bits() -> None:
    a, b = CASES["truncating, raw scales"]
    turned = NVFP4Tensor(a.codes.T.contiguous().T, a.scales.T.contiguous().T, a.outer)
    assert not turned.codes.is_contiguous()
    assert torch.equal(bits(gemm.matmul(turned, b)), bits(gemm.matmul(a, b)))


def test_gaussian_products_rest_on_no_undecided_rule() -> None:
    found = undecided.not_established_matmul(spread(32, 512, 0.0, 41), spread(32, 512, 0.0, 42))
    assert {rule: int(mask.sum()) for rule, mask in found.items() if mask.any()} == {}


def test_spread_blocks_depend_on_the_order_of_k_and_the_report_says_so() -> None:
    a, b = spread(32, 1024, 1.0, 43), spread(32, 1024, 1.0, 44)
    found = undecided.not_established_matmul(a, b)
    assert found[undecided.DESCENDING].any() and not found["F = 34"].any()


def test_the_report_of_a_matmul_is_the_report_of_its_steps() -> None:
    a, b = raw(24, 256, 45, dead=0.3), raw(24, 256, 46, dead=0.3)
    fast = undecided.not_established_matmul(a, b)
    steps = undecided.not_established(mma.Operand(a.codes, a.scales), mma.Operand(b.codes, b.scales), NVFP4)
    assert fast.keys() == steps.keys() and all(torch.equal(fast[rule], steps[rule]) for rule in fast)
