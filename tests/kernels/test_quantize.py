"""Kernel 1 equals the emulator byte for byte: in the interpreter here, on the GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quads.emulation import quantizers, reciprocal
from quads.kernels import quantize as kernel

Launch = Callable[..., Any]
GPU = torch.cuda.is_available()


def assert_same_bytes(got: Tensor, want: Tensor, what: str) -> None:
    """Name the number of wrong bytes and the first of them."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    wrong = (got != want).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise AssertionError(f"{what}: {len(wrong)} of {want.numel()} differ, first at {at}: {got[at]}, not {want[at]}")


def assert_equal(got: kernel.PackedNVFP4, want: quantizers.NVFP4Tensor) -> None:
    assert_same_bytes(got.outer.view(torch.int32), want.outer.view(torch.int32), "outer")
    assert_same_bytes(got.scales, want.scales, "scales")
    assert_same_bytes(got.packed, want.packed, "packed")


def amax_and_block_max(step: int) -> Tensor:
    """Rows [A, ...] for every `step`-th bfloat16 A of [2, 4), blocks for every bfloat16 v <= A down to underflow.

    The elements after v are multiples of v / 6 at and beside the rounding boundaries of E2M1, in bfloat16.
    """
    significand = torch.arange(128, 256).float()
    v = torch.cat([torch.ldexp(significand, torch.tensor(e - 7)) for e in range(-9, 2)])
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    block = torch.cat([v[:, None], v[:, None] / 6 * ties, -v[:, None] / 6 * ties * (1 + 2**-8)], dim=1)
    blocks = torch.cat([block, torch.zeros(len(v), 1)], dim=1)
    rows = []
    for a in torch.ldexp(significand, torch.tensor(-6))[::step]:
        first = torch.zeros(1, 16)
        first[0, 0] = a
        rows.append(torch.cat([first, blocks.clamp(-a, a)]).flatten())
    return torch.stack(rows).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("granularity", ["tensor", "token"])
def test_values_of_very_different_size_give_the_emulators_bytes(
    launch: Launch, dtype: torch.dtype, granularity: kernel.Granularity
) -> None:
    torch.manual_seed(1)
    x = (torch.randn(37, 176) * torch.exp(3 * torch.randn(37, 1)) * torch.exp(torch.randn(37, 176))).to(dtype)
    x[3] = 0
    x[4, :16] = -0.0
    x[5] *= 1e-6
    x[6, ::3] = -0.0
    want = quantizers.quantize(x, granularity=granularity)
    assert_equal(launch(kernel.quantize, x, granularity=granularity), want)
    assert_equal(launch(kernel.quantize, x, want.outer, granularity=granularity), want)


@pytest.mark.parametrize(
    "step", [pytest.param(32, id="few"), pytest.param(1, id="all", marks=() if GPU else pytest.mark.full)]
)
def test_every_pair_of_bfloat16_amax_and_block_max_gives_the_emulators_bytes(launch: Launch, step: int) -> None:
    x = amax_and_block_max(step)
    assert_equal(launch(kernel.quantize, x, granularity="token"), quantizers.quantize(x, granularity="token"))


@pytest.mark.parametrize("exponent", [-126, -100, -33, -31, 59, 61, 110])
def test_outer_scales_inside_and_outside_the_range_of_the_fast_quotient(launch: Launch, exponent: int) -> None:
    torch.manual_seed(2)
    x = torch.randn(8, 64) * torch.exp(torch.randn(8, 4)).repeat_interleave(16, 1)
    x = torch.ldexp(x, torch.tensor(exponent))
    outer = torch.tensor(2.0**exponent / 300)
    assert_equal(launch(kernel.quantize, x, outer), quantizers.quantize(x, outer))


@pytest.mark.parametrize("outer", [1e-38, 1e-20, 2.0**-31, 1.0, 1e30])
def test_an_outer_scale_that_does_not_fit_saturates_or_underflows_as_the_emulator(launch: Launch, outer: float) -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -3.0, 448.0, 2688.0, 3e38, -1e-38] * 4).reshape(2, 16)
    g = torch.tensor(outer)
    assert_equal(launch(kernel.quantize, x, g), quantizers.quantize(x, g))


def test_float32_subnormals_are_kept(launch: Launch) -> None:
    x = torch.arange(-64, 64).reshape(2, 64).to(torch.int32).abs().view(torch.float32) * torch.tensor([[1.0], [-1.0]])
    assert x.abs().max() > 0
    g = torch.tensor(2.0**-149 * 3)
    assert_equal(launch(kernel.quantize, x, g), quantizers.quantize(x, g))
    assert_equal(launch(kernel.quantize, x), quantizers.quantize(x))


@pytest.mark.parametrize("shape", [(1, 16), (1, 48), (5, 1152), (129, 464), (2, 3, 32)])
def test_odd_shapes(launch: Launch, shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    x = torch.randn(shape).bfloat16()
    want = quantizers.quantize(x.flatten(0, -2), granularity="token")
    assert_equal(launch(kernel.quantize, x, granularity="token"), want)


@pytest.mark.parametrize("view", ["transposed", "odd stride", "every second row", "misaligned"])
def test_views_that_are_not_contiguous(launch: Launch, view: str) -> None:
    torch.manual_seed(4)
    base = torch.randn(48, 49).bfloat16()
    x = {
        "transposed": base[:, :32].t(),
        "odd stride": base[:, :48],
        "every second row": torch.randn(8, 64).bfloat16()[::2],
        "misaligned": base[:, 1:],
    }[view]
    assert_equal(launch(kernel.quantize, x), quantizers.quantize(x.contiguous()))


def test_no_rows_give_no_bytes(launch: Launch) -> None:
    got = launch(kernel.quantize, torch.empty(0, 64).bfloat16(), granularity="token")
    assert (got.packed.shape, got.scales.shape, got.outer.shape) == ((0, 32), (0, 4), (0, 1))


@pytest.mark.parametrize(("m", "k"), [(1, 16), (5, 464), (129, 176)])
def test_the_128x4_layout_holds_every_scale_and_zero_padding(launch: Launch, m: int, k: int) -> None:
    torch.manual_seed(5)
    x = torch.randn(m, k).bfloat16()
    want = quantizers.quantize(x)
    columns = -(-(k // 16) // 4) * 4
    swizzled = torch.zeros(-(-m // 128) * 128 * columns, dtype=torch.uint8)
    for row in range(m):
        for block in range(k // 16):
            atom = (row // 128) * (columns // 4) + block // 4
            swizzled[atom * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4] = want.scales[row, block]
    got = launch(kernel.quantize, x, layout="128x4")
    assert_same_bytes(got.scales, swizzled, "scales")
    assert_same_bytes(got.packed, want.packed, "packed")


@pytest.mark.parametrize("granularity", ["tensor", "token"])
def test_the_vllm_dialect_equals_its_emulation(launch: Launch, granularity: kernel.Granularity) -> None:
    """On a GPU with the reciprocals measured on an H200; the interpreter's are the correctly rounded ones."""
    torch.manual_seed(7)
    x = (torch.randn(33, 176) * torch.exp(2 * torch.randn(33, 1))).bfloat16()
    x[3], x[4, :16], x[5, 1:16] = 0, -0.0, 0
    amax = x.float().abs().amax() if granularity == "tensor" else x.float().abs().amax(-1, keepdim=True) + 0.01
    encode = torch.tensor(2688.0) / amax
    rcp = reciprocal.NAMED["table" if GPU else "exact"]
    want = quantizers.trace(x, encode, granularity=granularity, dialect="vllm_kernel", rcp=rcp).result
    got = launch(kernel.quantize, x, encode, granularity=granularity, dialect="vllm")
    assert_same_bytes(got.scales, want.scales, "scales")
    assert_same_bytes(got.packed, want.packed, "packed")
    assert torch.equal(got.outer, encode)


@pytest.mark.parametrize(
    ("x", "kwargs", "message"),
    [
        (torch.zeros(2, 24), {}, r"x of shape \(2, 24\): K must be a positive multiple of 16"),
        (torch.zeros(2, 16, dtype=torch.int32), {}, r"x has dtype torch.int32"),
        (torch.zeros(2, 16), {"outer": torch.ones(3), "granularity": "token"}, r"outer of shape \(3,\)"),
        (torch.zeros(2, 16), {"layout": "8x4"}, r"layout '8x4' is unknown"),
        (torch.zeros(2, 16), {"granularity": "row"}, r"granularity 'row' is unknown"),
        (torch.zeros(2, 16), {"dialect": "vllm"}, r"outer is None"),
    ],
)
def test_bad_input_is_refused_in_one_line(launch: Launch, x: Tensor, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch(kernel.quantize, x, **kwargs)


@pytest.mark.parametrize("k", [16, 48, 4096, 8208])
def test_the_outer_scale_of_each_row_is_the_emulators(launch: Launch, k: int) -> None:
    x = torch.randn(4, k, generator=torch.Generator().manual_seed(k)) * torch.tensor([[1.0], [1e-38], [0.0], [1e30]])
    x[0, -1] = -50.0
    wanted = quantizers.quantize(x, granularity="token").outer
    assert torch.equal(launch(kernel.outer_scale, x, "token"), wanted)


@pytest.mark.skipif(GPU, reason="needs a machine without a GPU")
def test_without_a_gpu_the_reason_is_one_line() -> None:
    with pytest.raises(RuntimeError, match=r"^quantize needs a CUDA GPU; found no CUDA GPU$"):
        kernel.quantize(torch.zeros(1, 16))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    rows, k = 2**18 + 3, 8192
    x = torch.empty(rows, k, dtype=torch.bfloat16, device="cuda").zero_()
    torch.manual_seed(6)
    x[-5:] = torch.randn(5, k, device="cuda").bfloat16()
    got = kernel.quantize(x)
    want = quantizers.quantize(x[-5:].cpu())
    assert_same_bytes(got.packed[-5:].cpu(), want.packed, "packed")
    assert_same_bytes(got.scales[-5:].cpu(), want.scales, "scales")


def _into_held_storage(x: Tensor, packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, bool]:
    q = kernel.quantize(x, out=(packed, scales))
    return q.packed, q.scales, q.packed.data_ptr() == packed.data_ptr() and q.scales.data_ptr() == scales.data_ptr()


def test_given_storage_is_written_and_returned(launch: Launch) -> None:
    x = torch.randn(5, 48).bfloat16()
    held = torch.full((5, 24), 0xAA, dtype=torch.uint8), torch.full((5, 3), 0xAA, dtype=torch.uint8)
    packed, scales, same = launch(_into_held_storage, x, *held)
    want = quantizers.quantize(x)
    assert same
    assert_same_bytes(packed, want.packed, "packed")
    assert_same_bytes(scales, want.scales, "scales")


def test_storage_of_another_shape_is_refused(launch: Launch) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        launch(_into_held_storage, torch.ones(5, 48), torch.zeros(5, 20, dtype=torch.uint8), torch.zeros(5, 3))
