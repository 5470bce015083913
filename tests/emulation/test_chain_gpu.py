"""The GPU kernel of the chain against `mma.chain`: in Triton's interpreter where there is no GPU, which needs its own
process because the interpreter is chosen when triton is first imported."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import Tensor

from quads.emulation import gemm, mma
from quads.emulation.quantizers import NVFP4Tensor

pytest.importorskip("triton")

VARIANTS = [{}, {"dead_group": "included"}, {"cancelled_group": "excluded"}, {"fraction_bits": 34}]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    os.environ["TRITON_INTERPRET"] = "1"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as worker:
        worker.submit(os.getpid).result()
        os.environ.pop("TRITON_INTERPRET")
        yield worker


def interpret(a: mma.Operand, b: mma.Operand, model: mma.Model) -> Tensor:
    from quads.emulation import chain_gpu

    return chain_gpu.chain(a, b, model)


def operand(rows: int, k: int, seed: int, *, nan: bool) -> mma.Operand:
    """Random codes and scale bytes; a third of the groups dead; NaN scales in one row only."""
    g = torch.Generator().manual_seed(seed)
    scales = torch.randint(0, 256, (rows, k // 16), generator=g)
    scales = torch.where((scales & 0x7F) == 0x7F, 0, scales)
    off = (torch.rand(rows, k // 16, generator=g) < 0.33).repeat_interleave(16, -1)
    codes = torch.where(off, 0, torch.randint(0, 16, (rows, k), generator=g))
    if nan:
        scales[1, 0] = 0xFF
    return mma.Operand(codes.to(torch.uint8), scales.to(torch.uint8))


@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_the_kernel_is_the_step_model_in_the_interpreter(interpreter: ProcessPoolExecutor, change: dict) -> None:
    model = gemm.NVFP4.replace(**change)
    a, b = operand(18, 192, 1, nan=True), operand(35, 192, 2, nan=True)
    got = interpreter.submit(interpret, a, b, model).result()
    assert torch.equal(got.view(torch.int32), mma.chain(a, b, model))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(18, 35, 192), (400, 400, 1024)])
@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_the_kernel_is_the_step_model_on_a_gpu(shape: tuple[int, int, int], change: dict) -> None:
    m, n, k = shape
    a, b = operand(m, k, 3, nan=False), operand(n, k, 4, nan=True)
    model = gemm.NVFP4.replace(**change)
    on_gpu = [NVFP4Tensor(x.codes.cuda(), x.scales.cuda(), torch.tensor(1.0)) for x in (a, b) if x.scales is not None]
    got = gemm.matmul(*on_gpu, model=model)
    assert torch.equal(got.cpu().view(torch.int32), mma.chain(a, b, model))
