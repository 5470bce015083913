"""What this machine can do, measured in the same run: copy bandwidth and matrix peaks, of which all shares are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from quads.bench import counts, drawn, peers, peers_cuda
from quads.bench.cases import Case, Group, Ready
from quads.kernels import support

SIZES = {"cuda": (2**31, 8192), "cpu": (2**26, 512)}


def groups(device: str) -> Iterator[Group]:
    """Copy and square products: bfloat16 and FP8 (row-wise scales, fast accumulation) on a GPU, float32 on a CPU."""
    size, n = SIZES[device]
    group = partial(Group, op="ceiling", device=device, quick=True)
    copy = Case(numerics="copy", implementation="torch.copy", ready=partial(_copy, size, device))
    yield group(shape={"bytes": 2 * size}, cases=(copy,))
    square = {"M": n, "N": n, "K": n}
    if device == "cpu":
        plain = Case(numerics="fp32", implementation="torch.mm", ready=partial(_product, n, "cpu", torch.float32))
        yield group(shape=square, cases=(plain,))
        return
    bf16 = Case(numerics="bf16", implementation="torch.cublas", ready=partial(_product, n, "cuda", torch.bfloat16))
    fp8 = Case(numerics="fp8", implementation="torch.scaled_mm", ready=partial(_fp8, n), missing=peers.missing_fp8)
    nvfp4 = Case(
        numerics="nvfp4", implementation="torch.scaled_mm", ready=partial(_nvfp4, n), missing=support.missing_blackwell
    )
    yield from (group(shape=square, cases=(case,)) for case in (bf16, fp8, nvfp4))


def _copy(size: int, device: str, _: None) -> Ready:
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Not as a graph: a graph's copy node moves 2.8 TB/s on an H200 where the call moves 4.2.
    return Ready(calls=[lambda: target.copy_(source)], bytes=2.0 * size, graph=False)


def _product(n: int, device: str, dtype: torch.dtype, _: None) -> Ready:
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    numerics = "fp32" if dtype == torch.float32 else "bf16"
    return Ready(calls=[lambda: a @ b.t()], bytes=3.0 * n * n * dtype.itemsize, flops=2.0 * n**3, peak=numerics)


def _fp8(n: int, _: None) -> Ready:
    a, b = (torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    rows, columns = torch.ones(n, 1, device="cuda"), torch.ones(1, n, device="cuda")

    def call() -> torch.Tensor:
        return torch._scaled_mm(a, b.t(), scale_a=rows, scale_b=columns, out_dtype=torch.bfloat16, use_fast_accum=True)

    return Ready(calls=[call], bytes=4.0 * n * n, flops=2.0 * n**3, peak="fp8")


def _nvfp4(n: int, _: None) -> Ready:
    a, b = (drawn.packed(n, n // 16, per_row=False) for _ in range(2))
    calls = peers_cuda.scaled_mm_nvfp4([b])(a)
    return Ready(calls=calls, bytes=2 * n * n * counts.NVFP4 + 2.0 * n * n, flops=2.0 * n**3, peak="nvfp4")
