"""The emulator's FP4 products beside mmasim's and a plain float32 product, and the emulated layer; by M, N, K, experts.

Data: `raw` random code nibbles and random scale bytes (NaN scales included, as mmasim's own tests draw them), `finite`
the same without NaN scales, `quantized` Gaussian activations and weights after quantisation. `prepared`: the weight's
tables are made once, as a rollout does. Before a speed is taken the FP32 words of both emulators are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from quads.bench import counts, peers
from quads.bench.cases import Case, Group, Ready
from quads.bench.checks import unequal
from quads.emulation import gemm, moe
from quads.emulation.quantizers import Granularity, NVFP4Tensor, quantize, unscaled

KINDS = ("raw", "quantized", "finite")
SQUARE = {"cpu": ((128, 128, 1024),), "cuda": ((128, 128, 1024), (512, 512, 1024), (1024, 1024, 1024))}
ROLLOUT = (
    (128, 512, 1024), (1, 512, 1024), (16, 512, 1024), (512, 512, 1024),
    (128, 128, 1024), (128, 2048, 1024), (128, 512, 256), (128, 512, 4096),
)  # fmt: skip
LAYERS = ((16, 8), (64, 8), (16, 32))  # tokens, experts
HIDDEN, INNER, TOP_K = 256, 128, 2


def groups(device: str) -> Iterator[Group]:
    """mmasim's problem on each kind of data, products with a prepared weight by M, N and K, layers on the CPU."""
    for shape in SQUARE[device]:
        for kind in KINDS:
            yield _group(shape, device, kind, quick=shape == SQUARE[device][0] and kind != "finite")
    for shape in ROLLOUT:
        yield _prepared(shape, device, quick=device == "cpu" and shape == ROLLOUT[0])
    for tokens, experts in LAYERS if device == "cpu" else ():
        sizes = {"tokens": tokens, "hidden": HIDDEN, "inner": INNER, "experts": experts, "top_k": TOP_K}
        case = Case(numerics="nvfp4", implementation="quads.emulation", ready=partial(_layer, tokens, experts))
        quick = (tokens, experts) == LAYERS[0]
        yield Group(op="moe", shape=sizes, device=device, cases=(case,), quick=quick)


def _group(shape: tuple[int, int, int], device: str, kind: str, *, quick: bool) -> Group:
    def inputs() -> tuple[NVFP4Tensor, NVFP4Tensor]:
        return operand(kind, shape[0], shape[2], 1, device), operand(kind, shape[1], shape[2], 2, device)

    ours = Case(numerics="nvfp4", variant=kind, implementation="quads.emulation", ready=_ours)
    theirs = Case(numerics="nvfp4", variant=kind, implementation="mmasim", ready=_mmasim, missing=peers.missing_mmasim)
    sizes = dict(zip("MNK", shape, strict=True))
    return Group(op="emulator", shape=sizes, device=device, cases=(ours, theirs), inputs=inputs, quick=quick)


def _prepared(shape: tuple[int, int, int], device: str, *, quick: bool) -> Group:
    def inputs() -> tuple[NVFP4Tensor, NVFP4Tensor]:
        return operand("quantized", shape[0], shape[2], 1, device), operand("quantized", shape[1], shape[2], 2, device)

    ours = Case(numerics="nvfp4", variant="prepared", implementation="quads.emulation", ready=_ours_prepared)
    plain = Case(numerics="fp32", variant="prepared", implementation="torch.mm", ready=partial(_float32, shape, device))
    sizes = dict(zip("MNK", shape, strict=True))
    return Group(op="emulator", shape=sizes, device=device, cases=(ours, plain), inputs=inputs, quick=quick)


def operand(
    kind: str, rows: int, k: int, seed: int, device: str = "cpu", granularity: Granularity = "token"
) -> NVFP4Tensor:
    """A random NVFP4 matrix [rows, K] of one of KINDS; `granularity` of the outer scale where it is quantised."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "quantized":
        q = quantize(torch.randn(rows, k, generator=generator), granularity=granularity)
    else:
        scales = torch.randint(0, 256, (rows, k // 16), dtype=torch.uint8, generator=generator)
        if kind == "finite":
            scales = torch.where((scales & 0x7F) == 0x7F, 0x38, scales)
        codes = torch.randint(0, 16, (rows, k), dtype=torch.uint8, generator=generator)
        q = NVFP4Tensor(codes, scales, torch.tensor(1.0))
    return NVFP4Tensor(q.codes.to(device), q.scales.to(device), q.outer.to(device))


def mmasim_product(a: NVFP4Tensor, b: NVFP4Tensor) -> Tensor:
    """The same product through mmasim: m128n128k64 mxf4nvf4 block16 ue4m3, C = 0."""
    from mmasim import nv_ptx

    shape = "m128n128k64.kind::mxf4nvf4.block16.f32.e2m1.e2m1.ue4m3"
    operation = nv_ptx.TCGen05MMABlockScale("Blackwell", shape)
    c = torch.zeros(len(a.codes), len(b.codes), device=a.codes.device)
    scales = (x.scales.view(torch.float8_e4m3fn) for x in (a, b))
    return operation(a.packed, b.packed.T, c, next(scales), next(scales).T)


def words_error(a: NVFP4Tensor, b: NVFP4Tensor, got: Tensor) -> float:
    """0.0 where the FP32 words are mmasim's, or, where it is missing, |y - exact| over 2^-16 of the sum of |a b|."""
    if not peers.missing_mmasim() and not (len(a.codes) % 128 or len(b.codes) % 128):
        return unequal(got, mmasim_product(a, b), "FP32 words")
    x, w = unscaled(a).double(), unscaled(b).double()
    finite = got.isfinite()
    off = (got.double() - x @ w.T).abs() / (2.0**-16 * (x.abs() @ w.abs().T))
    return float(off[finite].nan_to_num(nan=0.0).max())


def _ready(a: NVFP4Tensor, b: NVFP4Tensor, call: partial[Tensor], *, check: bool = True) -> Ready:
    moved, flops = counts.gemm(len(a.codes), len(b.codes), a.codes.shape[1], "nvfp4", "nvfp4")
    held = (lambda: words_error(a, b, call())) if check else None
    return Ready(calls=[call], bytes=moved, flops=flops, check=held, graph=False, in_a_row=False)


def _ours(operands: tuple[NVFP4Tensor, NVFP4Tensor]) -> Ready:
    a, b = operands
    return _ready(a, b, partial(gemm.matmul, a, b))


def _ours_prepared(operands: tuple[NVFP4Tensor, NVFP4Tensor]) -> Ready:
    a, b = operands
    return _ready(a, b, partial(gemm.matmul, a, gemm.prepare(b)))


def _mmasim(operands: tuple[NVFP4Tensor, NVFP4Tensor]) -> Ready:
    return _ready(*operands, partial(mmasim_product, *operands), check=False)


def _float32(shape: tuple[int, int, int], device: str, _: object) -> Ready:
    m, n, k = shape
    x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    moved, flops = counts.gemm(m, n, k, "fp32", "fp32")
    peak = "fp32" if device == "cpu" else ""
    return Ready(calls=[lambda: x @ w.T], bytes=moved, flops=flops, peak=peak, graph=False, in_a_row=False)


def _layer(tokens: int, experts: int, _: None) -> Ready:
    def weight(seed: int, n: int, k: int) -> gemm.Prepared:
        return gemm.prepare(operand("quantized", n, k, seed, granularity="tensor"))

    held = [
        moe.Expert(weight(3 * e, INNER, HIDDEN), weight(3 * e + 1, INNER, HIDDEN), weight(3 * e + 2, HIDDEN, INNER))
        for e in range(experts)
    ]
    x = torch.randn(tokens, HIDDEN).bfloat16()
    ids = torch.rand(tokens, experts).argsort(1)[:, :TOP_K]
    routed = torch.softmax(torch.randn(tokens, TOP_K), -1)
    used = len(ids.unique())
    moved, flops = counts.moe(tokens, TOP_K, used, HIDDEN, INNER, "nvfp4")
    call = partial(moe.layer, x, ids, routed, held)
    return Ready(calls=[call], bytes=moved, flops=flops, check=lambda: _layer_error(call()))


def _layer_error(y: Tensor) -> float:
    """The arithmetic is held by tests/emulation/test_moe.py; here only that the layer gave finite, non-zero rows."""
    return 0.0 if bool(y.isfinite().all() & (y != 0).any(1).all()) else float("inf")
