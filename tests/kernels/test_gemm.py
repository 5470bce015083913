"""The Triton product equals the emulator's bit for bit, on the interpreter here; the Hopper ways on the H200."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quads.emulation import gemm as emulator
from quads.emulation import residual
from quads.emulation.quantizers import NVFP4Tensor, quantize
from quads.kernels import gemm as kernel
from quads.kernels.prepack import NativeWeight, prepare_native
from quads.kernels.quantize import PackedNVFP4

Launch = Callable[..., Any]


def packed(q: NVFP4Tensor) -> PackedNVFP4:
    return PackedNVFP4(q.packed, q.scales, q.outer)


def operands(m: int, n: int, k: int, seed: int = 0) -> tuple[Tensor, NVFP4Tensor, NVFP4Tensor]:
    """x, Q(x) per token, Q(w) per tensor: normal values, on which FP32 sums of this length are exact (A.4)."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    return x, quantize(x, granularity="token"), quantize(w)


def expected(a: NVFP4Tensor, w: NVFP4Tensor, dtype: torch.dtype) -> Tensor:
    return emulator.epilogue(emulator.matmul(a, w), a.outer * w.outer, dtype)


def with_residual(x: Tensor, a: NVFP4Tensor, blocks: Tensor) -> NVFP4Tensor:
    return emulator.concat_k(a, residual.quantize_residual(x, a, blocks))


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    integer = torch.int32 if got.dtype == torch.float32 else torch.int16
    different = (got.view(integer) != want.view(integer)).nonzero()
    assert len(different) == 0, f"{len(different)} of {want.numel()} differ, first at {different[:1].tolist()}"


def repeated(m: int, n: int, k: int, blocks: Tensor) -> tuple[NVFP4Tensor, NVFP4Tensor, NVFP4Tensor]:
    """The augmented activations, the plain weight and the weight with its columns repeated."""
    x, a, w = operands(m, n, k)
    return with_residual(x, a, blocks), w, emulator.concat_k(w, emulator.select_blocks(w, blocks))


@pytest.mark.parametrize("shape", [(1, 40, 16), (3, 33, 48), (65, 20, 64), (5, 16, 1152)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_equals_the_emulator(launch: Launch, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    _, a, w = operands(*shape)
    assert_same_bits(launch(kernel.gemm, packed(a), packed(w), out_dtype=dtype), expected(a, w, dtype))


@pytest.mark.parametrize("blocks", [[2], [0, 1, 5], [0, 1, 2, 3, 4, 5]])
def test_repeated_blocks_equal_a_weight_with_copied_columns(launch: Launch, blocks: list[int]) -> None:
    chosen = torch.tensor(blocks)
    a, w, copied = repeated(5, 24, 96, chosen)
    got = launch(kernel.gemm, packed(a), packed(w), blocks=chosen.int(), out_dtype=torch.float32)
    assert_same_bits(got, expected(a, copied, torch.float32))


def test_no_repeated_block_equals_the_plain_product(launch: Launch) -> None:
    _, a, w = operands(5, 24, 96)
    none = torch.zeros(0, dtype=torch.int32)
    got = launch(kernel.gemm, packed(a), packed(w), blocks=none, out_dtype=torch.float32)
    assert_same_bits(got, launch(kernel.gemm, packed(a), packed(w), out_dtype=torch.float32))


def test_every_block_repeated_equals_two_passes(launch: Launch) -> None:
    every = torch.arange(6)
    a, w, _ = repeated(5, 24, 96, every)
    one = launch(kernel.gemm, packed(a), packed(w), blocks=every.int(), out_dtype=torch.float32)
    main, rest = (NVFP4Tensor(a.codes[:, s], a.scales[:, t], a.outer) for s, t in _halves(96))
    two = emulator.matmul(main, w) + emulator.matmul(rest, w)
    assert_same_bits(one, emulator.epilogue(two, a.outer * w.outer, torch.float32))


def _halves(k: int) -> list[tuple[slice, slice]]:
    return [(slice(0, k), slice(0, k // 16)), (slice(k, None), slice(k // 16, None))]


def test_one_outer_scale_for_all_tokens(launch: Launch) -> None:
    _, a, w = operands(5, 24, 96)
    a = replace(a, outer=torch.tensor(0.37))
    got = launch(kernel.gemm, packed(a), packed(w), out_dtype=torch.float32)
    assert_same_bits(got, expected(a, w, torch.float32))


def test_nan_scales_and_signed_scales_are_read_as_the_tensor_cores_do(launch: Launch) -> None:
    _, a, w = operands(4, 8, 32)
    a.scales[1, 0], a.scales[2, 1] = 0x7F, a.scales[2, 1] | 0x80
    got = launch(kernel.gemm, packed(a), packed(w), out_dtype=torch.float32)
    want = expected(a, w, torch.float32)
    assert got[1].isnan().all() and want[1].isnan().all()
    assert_same_bits(got[[0, 2, 3]], want[[0, 2, 3]])


def test_inputs_with_strides_give_the_same_product(launch: Launch) -> None:
    _, a, w = operands(6, 24, 96)
    wide = PackedNVFP4(*(torch.stack([x, x ^ 0x11], 1)[:, 0] for x in (a.packed, a.scales)), a.outer)
    assert not wide.packed.is_contiguous()
    got = launch(_strided, wide.packed, wide.scales, a.outer, packed(w))
    assert_same_bits(got, expected(a, w, torch.float32))


def _strided(codes: Tensor, scales: Tensor, outer: Tensor, w: PackedNVFP4) -> Tensor:
    """`gemm` on rows two apart: pickling between processes would make them contiguous."""
    apart = [torch.stack([x, x ^ 0x11], 1)[:, 0] for x in (codes, scales)]
    return kernel.gemm(PackedNVFP4(*apart, outer), w, out_dtype=torch.float32)


def test_no_tokens_give_an_empty_result(launch: Launch) -> None:
    _, a, w = operands(2, 24, 96)
    none = PackedNVFP4(a.packed[:0], a.scales[:0], a.outer[:0])
    assert launch(kernel.gemm, none, packed(w)).shape == (0, 24)


def test_a_weight_is_rewritten_in_place(launch: Launch) -> None:
    _, a, w = operands(3, 24, 96)
    _, _, other = operands(3, 24, 96, seed=1)
    got = launch(_rewrite, packed(a), packed(w), packed(other))
    assert_same_bits(got, expected(a, other, torch.float32))


def _rewrite(a: PackedNVFP4, w: PackedNVFP4, other: PackedNVFP4) -> Tensor:
    first = kernel.prepare_weight(PackedNVFP4(w.packed.clone(), w.scales, w.outer))
    assert kernel.prepare_weight(other, out=first) is first
    return kernel.gemm(a, first, out_dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packed": slice(0, 40)}, "a: packed"),
        ({"scales": slice(0, 5)}, "a: packed"),
    ],
)
def test_operands_that_do_not_fit_are_refused(launch: Launch, change: dict[str, slice], message: str) -> None:
    _, a, w = operands(2, 24, 96)
    broken = {name: getattr(packed(a), name)[:, part] for name, part in change.items()}
    with pytest.raises(ValueError, match=message):
        launch(kernel.gemm, replace(packed(a), **broken), packed(w))


def test_the_native_way_is_chosen_for_a_native_weight() -> None:
    _, _, w = operands(1, 24, 96)
    weight = prepare_native(packed(w))
    assert isinstance(weight, NativeWeight)
    assert kernel.choose(1, weight) == "native"
