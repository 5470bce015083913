"""W4A4 products on a GPU beside cuBLAS bfloat16, FP8 (cuBLASLt, vLLM's CUTLASS, DeepGEMM) and Marlin, by M, N and K.

Weights rotate over up to eight sets, 300 MB in four bits, so that they are cold in L2 in a row too. Activations are
random codes and scales, quantised beforehand; variants that say `from bf16` quantise them in the timed call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from quads.bench import counts, drawn, peers, peers_cuda
from quads.bench.cases import Case, Goal, Group, Ready
from quads.bench.timing import Call
from quads.kernels import compensate, gemm, support
from quads.kernels.prepack import PreparedWeight
from quads.kernels.quantize import PackedNVFP4, quantize

FIRST = (1, 16, 64, 8192)
MORE = (2, 4, 8, 32, 128, 256, 512, 1024, 2048, 4096)
SIDE = 8192
SHAPES = ((2048, 2048), (4096, 4096), (1024, 8192), (28672, 8192), (8192, 28672), (16384, 16384))  # (N, K), 16 tokens
OURS = "quads.kernels"


@dataclass(frozen=True)
class Shape:
    """Tokens and the size of the weight; `sets` of weights rotate."""

    m: int
    n: int
    k: int

    @property
    def sets(self) -> int:
        return 2 if self.m > 192 else max(2, min(8, math.ceil(3e8 / (self.n * self.k * counts.NVFP4))))


def groups(device: str) -> Iterator[Group]:
    """Square products of the first and the further numbers of tokens, then other weights at 16 tokens."""
    if device != "cuda":
        return
    for m in (*FIRST, *MORE):
        yield _group(Shape(m, SIDE, SIDE), quick=m in FIRST)
    for n, k in SHAPES:
        yield _group(Shape(16, n, k), quick=False)


def _group(shape: Shape, *, quick: bool) -> Group:
    sizes = {"M": shape.m, "N": shape.n, "K": shape.k}
    return Group(op="gemm", shape=sizes, device="cuda", cases=_cases(shape, quick), inputs=lambda: shape, quick=quick)


def _cases(shape: Shape, quick: bool) -> tuple[Case, ...]:
    few, ours = shape.m <= 64, partial(Case, implementation=OURS, missing=_missing_ours)
    bf16 = Goal(text="bf16 / ours >= 2.2", at_least=2.2) if few else Goal(text="bf16 / ours >= 0.90", at_least=0.9)
    fp8 = Goal(text="fp8 / ours >= 1.5", at_least=1.5) if few else None
    rac = Goal(text="RAC / naive <= 1.15", at_most=1.15) if few else Goal(text="RAC / naive <= 1.45", at_most=1.45)
    marlin = Goal(text="Marlin / ours >= 1.0", at_least=1.0) if few else None
    vllm = partial(Case, missing=peers.missing_vllm)
    cases = (
        ours(numerics="nvfp4", ready=_ours),
        ours(numerics="quads", variant="50 %", ready=_rac, goal=rac),
        Case(numerics="bf16", implementation="torch.cublas", ready=_cublas, missing=support.missing_gpu, goal=bf16),
        Case(numerics="fp8", implementation="torch.scaled_mm", ready=_scaled, missing=peers.missing_fp8, goal=fp8),
        Case(numerics="nvfp4", implementation="torch.scaled_mm", ready=_native, missing=support.missing_blackwell),
        vllm(numerics="fp8", implementation="vllm.cutlass", ready=_vllm_fp8, goal=fp8),
        vllm(numerics="w4a16", implementation="vllm.marlin", ready=_marlin, goal=marlin),
    )
    if not quick:
        return cases
    quantized = partial(_vllm_fp8, quantized=True)
    return (
        *cases,
        # Compiled for each shape, which takes seconds: only here.
        Case(numerics="fp8_block", implementation="deep_gemm", ready=_deep_gemm, missing=peers.missing_deep_gemm),
        ours(numerics="nvfp4", variant="from bf16", ready=_ours_from_bf16),
        ours(numerics="quads", variant="50 % from bf16", ready=_rac_from_bf16),
        vllm(numerics="fp8", variant="from bf16", implementation="vllm.cutlass", ready=quantized),
    )


def _missing_ours() -> str:
    return support.missing_triton() or support.missing_gpu() or support.missing_ampere()


@lru_cache(maxsize=1)
def four_bit(n: int, k: int, sets: int) -> tuple[list[PackedNVFP4], list[PreparedWeight]]:
    """Random packed weights, and the same in the kernels' order."""
    weights = [drawn.packed(n, k // 16, per_row=False) for _ in range(sets)]
    return weights, [gemm.prepare_weight(w) for w in weights]


@lru_cache(maxsize=1)
def sixteen_bit(n: int, k: int, sets: int) -> list[Tensor]:
    """Random bfloat16 weights."""
    return [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(sets)]


def _ready(s: Shape, calls: Sequence[Call], a: str, w: str, peak: str, *, extra: int = 0, **more: Any) -> Ready:
    moved, flops = counts.gemm(s.m, s.n, s.k, a, w, extra=extra)
    return Ready(calls=calls, bytes=moved, flops=flops, peak=peak, **more)


def peak_of_nvfp4() -> str:
    """The ceiling that a W4A4 product is held against: the format that its tensor-core instructions take."""
    return "bf16" if support.missing_blackwell() else "nvfp4"


def _ours(s: Shape) -> Ready:
    weights, prepared = four_bit(s.n, s.k, s.sets)
    a = drawn.packed(s.m, s.k // 16, per_row=True)
    calls = [partial(gemm.gemm, a, w) for w in prepared]
    check = partial(drawn.product_error, a, weights[0], None, calls[0])
    return _ready(s, calls, "nvfp4", "nvfp4", peak_of_nvfp4(), check=check, way=gemm.choose(s.m, prepared[0]))


def _rac(s: Shape) -> Ready:
    weights, prepared = four_bit(s.n, s.k, s.sets)
    blocks = drawn.half_of(s.k)
    a = drawn.packed(s.m, s.k // 16 + len(blocks), per_row=True)
    calls = [partial(gemm.gemm, a, w, blocks=blocks) for w in prepared]
    check = partial(drawn.product_error, a, weights[0], blocks, calls[0])
    way = gemm.choose(s.m, prepared[0], residual=True)
    return _ready(s, calls, "nvfp4", "nvfp4", peak_of_nvfp4(), extra=16 * len(blocks), check=check, way=way)


def _ours_from_bf16(s: Shape) -> Ready:
    weights, prepared = four_bit(s.n, s.k, s.sets)
    x = drawn.activations(s.m, s.k)

    def call(w: PreparedWeight) -> Tensor:
        return gemm.gemm(quantize(x, granularity="token"), w)

    calls = [partial(call, w) for w in prepared]
    check = partial(drawn.product_error, quantize(x, granularity="token"), weights[0], None, calls[0])
    return _ready(s, calls, "bf16", "nvfp4", peak_of_nvfp4(), check=check, way=gemm.choose(s.m, prepared[0]))


def _rac_from_bf16(s: Shape) -> Ready:
    weights, prepared = four_bit(s.n, s.k, s.sets)
    x, blocks = drawn.activations(s.m, s.k), drawn.half_of(s.k)
    known = {"static_blocks": blocks, "static_ranks": compensate.ranks(blocks, s.k // 16)}

    def operand() -> compensate.RacOperand:
        return compensate.quantize_rac(x, len(blocks), "static", granularity="token", **known)

    def call(w: PreparedWeight) -> Tensor:
        return gemm.gemm(operand(), w, blocks=blocks)

    calls = [partial(call, w) for w in prepared]
    check = partial(drawn.product_error, operand(), weights[0], blocks, calls[0])
    way = gemm.choose(s.m, prepared[0], residual=True)
    return _ready(s, calls, "bf16", "nvfp4", peak_of_nvfp4(), extra=16 * len(blocks), check=check, way=way)


def _cublas(s: Shape) -> Ready:
    x = drawn.activations(s.m, s.k)
    return _ready(s, [partial(_mm, x, w) for w in sixteen_bit(s.n, s.k, s.sets)], "bf16", "bf16", "bf16")


def _mm(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w.t())


def _peer(s: Shape, calls: Sequence[Call], a: str, w: str, peak: str, reference: Tensor) -> Ready:
    return _ready(s, calls, a, w, peak, check=partial(drawn.relative_error, calls[0], reference, 0.05))


def _scaled(s: Shape) -> Ready:
    weights, x = sixteen_bit(s.n, s.k, s.sets), drawn.activations(max(s.m, 16), s.k)  # cuBLASLt takes 16 rows or more
    return _peer(s, peers_cuda.scaled_mm(weights)(x), "fp8", "fp8", "fp8", _mm(x, weights[0]))


def _native(s: Shape) -> Ready:
    (weights, _), q = four_bit(s.n, s.k, s.sets), drawn.packed(max(s.m, 128), s.k // 16, per_row=True)
    reference = (drawn.values(q) @ drawn.values(weights[0]).T).bfloat16()
    return _peer(s, peers_cuda.scaled_mm_nvfp4(weights)(q), "nvfp4", "nvfp4", "nvfp4", reference)


def _vllm_fp8(s: Shape, *, quantized: bool = False) -> Ready:
    weights, x = sixteen_bit(s.n, s.k, s.sets), drawn.activations(s.m, s.k)
    calls = peers_cuda.vllm_fp8(weights, quantize=quantized)(x)
    return _peer(s, calls, "bf16" if quantized else "fp8", "fp8", "fp8", _mm(x, weights[0]))


def _deep_gemm(s: Shape) -> Ready:
    weights, x = sixteen_bit(s.n, s.k, s.sets), drawn.activations(s.m, s.k)
    return _peer(s, peers_cuda.deep_gemm_fp8(weights)(x), "fp8_block", "fp8_block", "fp8", _mm(x, weights[0]))


def _marlin(s: Shape) -> Ready:
    (weights, _), x = four_bit(s.n, s.k, s.sets), drawn.activations(s.m, s.k)
    wide = (drawn.values(weights[0]) * weights[0].outer.double()).bfloat16()
    return _peer(s, peers_cuda.marlin(weights)(x), "bf16", "w4a16", "bf16", _mm(x, wide))
