"""Kernel 3 equals the emulator's quantise-dequantise byte for byte, and is a well-behaved torch op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quads.emulation import quantizers
from quads.emulation.dialects import EXACT
from quads.kernels import fake_quant as kernel

Launch = Callable[..., Any]


def emulated(x: Tensor, outer: Tensor | None, weight_block: str, granularity: str) -> Tensor:
    q = quantizers.quantize(x, outer, granularity=granularity, dialect=EXACT.replace(tile=weight_block))
    return quantizers.dequantize(q, x.dtype)


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def uneven(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.exp(2 * torch.randn(*shape[:-1], 1))
    x[..., 3] = -0.0
    x[..., 1, :] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weight_block", ["1x16", "16x16"])
def test_values_equal_the_emulator(launch: Launch, weight_block: kernel.WeightBlock, dtype: torch.dtype) -> None:
    x = uneven((48, 176), dtype)
    got = launch(kernel.fake_quantize, x, weight_block=weight_block)
    assert got.dtype == dtype and torch.equal(bits(got), bits(emulated(x, None, weight_block, "tensor")))


def test_one_outer_scale_for_each_token(launch: Launch) -> None:
    x = uneven((7, 48), torch.bfloat16)
    got = launch(kernel.fake_quantize, x, granularity="token")
    assert torch.equal(bits(got), bits(emulated(x, None, "1x16", "token")))


@pytest.mark.parametrize("weight_block", ["1x16", "16x16"])
def test_one_outer_scale_for_each_expert(launch: Launch, weight_block: kernel.WeightBlock) -> None:
    x = uneven((3, 32, 48), torch.bfloat16)
    outer = x.float().abs().amax(dim=(1, 2), keepdim=True) / torch.tensor(2688.0)
    want = torch.stack([emulated(x[i], outer[i, 0, 0], weight_block, "tensor") for i in range(3)])
    assert torch.equal(bits(launch(kernel.fake_quantize, x, outer, weight_block=weight_block)), bits(want))


@pytest.mark.parametrize("exponent", [-100, -40, 70])
def test_outer_scales_outside_the_fast_range(launch: Launch, exponent: int) -> None:
    x = torch.ldexp(uneven((16, 32), torch.float32), torch.tensor(exponent))
    for weight_block in ("1x16", "16x16"):
        got = launch(kernel.fake_quantize, x, weight_block=weight_block)
        assert torch.equal(bits(got), bits(emulated(x, None, weight_block, "tensor")))


def test_a_shard_with_the_outer_scale_of_the_whole_is_a_slice_of_the_whole(launch: Launch) -> None:
    x = uneven((32, 64), torch.bfloat16)
    outer = quantizers.outer_scale(x)
    whole = launch(kernel.fake_quantize, x)
    shard = launch(kernel.fake_quantize, x[16:, 16:48], outer)
    assert torch.equal(bits(shard), bits(whole[16:, 16:48].contiguous()))


def test_no_rows(launch: Launch) -> None:
    assert launch(kernel.fake_quantize, torch.empty(0, 32)).shape == (0, 32)


@pytest.mark.parametrize(
    ("x", "kwargs", "message"),
    [
        (torch.ones(8, 32), {"weight_block": "16x16"}, r"16x16 blocks need a multiple of 16 rows"),
        (torch.ones(32, 32), {"weight_block": "16x16", "granularity": "token"}, r"needs one outer scale"),
        (torch.ones(4, 32), {"outer": torch.ones(3)}, r"3 scales do not divide 4 rows"),
        (torch.ones(4, 32), {"weight_block": "8x8"}, r"weight_block '8x8' is unknown"),
        (torch.ones(4, 32), {"granularity": "row"}, r"granularity 'row' is unknown"),
    ],
)
def test_bad_input_is_refused_in_one_line(launch: Launch, x: Tensor, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch(kernel.fake_quantize, x, **kwargs)


@pytest.fixture
def device() -> Iterator[str]:
    """Where the op runs here: the GPU, or the CPU with the emulator as its CPU kernel."""
    if torch.cuda.is_available():
        yield "cuda"
        return
    kernel.fake_quantize_op.register_kernel("cpu")(emulated)
    yield "cpu"


def test_the_op_passes_torchs_own_checks(device: str) -> None:
    x = uneven((16, 32), torch.float32).to(device).requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(kernel.fake_quantize_op, (x, None, "1x16", "tensor"), test_utils=tests)


def test_the_gradient_is_straight_through(device: str) -> None:
    x = uneven((16, 32), torch.bfloat16).to(device).requires_grad_()
    grad = torch.randn(16, 32).bfloat16().to(device)
    kernel.fake_quantize(x).backward(grad)
    assert x.grad is not None and torch.equal(x.grad, grad)


def test_compile_and_autocast_change_nothing(device: str) -> None:
    x = uneven((16, 32), torch.float32).to(device)
    compiled = torch.compile(lambda t: kernel.fake_quantize(t) * 2, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = kernel.fake_quantize(x)
    assert got.dtype == torch.float32
    assert torch.equal(compiled(x), got * 2)
    assert torch.equal(got.cpu(), emulated(x.cpu(), None, "1x16", "tensor"))


@pytest.mark.gpu
def test_a_cuda_graph_replays_the_same_bytes() -> None:
    x = uneven((64, 256), torch.bfloat16).cuda()
    outer = quantizers.outer_scale(x)
    want = kernel.fake_quantize(x, outer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = kernel.fake_quantize(x, outer)
    got.zero_()
    graph.replay()
    assert torch.equal(bits(got), bits(want))
