"""Products against float64 on shapes that do not fit tiles, experts with two outer scales, weights against the CPU's.

Run once before the first product of a run; yields what was compared, AssertionError where a bound is broken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from quads import qdq, recipes
from quads.bench import cases_moe, drawn
from quads.bench.checks import unequal
from quads.kernels import gemm, moe
from quads.kernels.gemm_details import prefill

TOKENS = (1, 7, 16, 31, 64, 100, 300)
WEIGHTS = ((512, 1152), (100, 48), (640, 4096))
LAYER = cases_moe.Size(0, hidden=1024, inner=512, experts=32, top_k=4)
LAYER_TOKENS = (1, 5, 64, 300, prefill.CROSSOVER * LAYER.experts // LAYER.top_k)  # every way of quads.kernels.moe


def dense() -> Iterator[str]:
    """FP32 products of 42 shapes, with RAC and without, within 5.25 n 2^-23 sum |a w|."""
    for m in TOKENS:
        for n, k in WEIGHTS:
            for rac in (False, True):
                blocks = drawn.half_of(k) if rac else None
                a = drawn.packed(m, k // 16 + (k // 32 if rac else 0), per_row=True)
                w = drawn.packed(n, k // 16, per_row=False)
                call = partial(gemm.gemm, a, w, blocks=blocks, out_dtype=torch.float32)
                error = drawn.product_error(a, w, blocks, call)
                name = f"M={m} N={n} K={k} rac={rac}"
                assert error <= 1, f"{name}: {error:.2f} times the bound"
                yield name


def layers() -> Iterator[str]:
    """A layer whose gate and up have different outer scales, plain, static and batch, at several numbers of tokens."""
    hidden, inner, experts = LAYER.hidden, LAYER.inner, LAYER.experts
    w13, w2 = (cases_moe.experts_weight(experts, *shape) for shape in ((2 * inner, hidden, 2), (hidden, inner, 1)))
    w13 = replace(w13, outer=w13.outer * torch.tensor([1.0, 0.37], device="cuda"))
    prepared = gemm.prepare_weight(w13, interleave=True), gemm.prepare_weight(w2)
    for tokens in LAYER_TOKENS:
        size = replace(LAYER, tokens=tokens)
        inputs = cases_moe.Inputs(size, drawn.activations(tokens, hidden), [cases_moe.routing(size)], w13, w2, prepared)
        for quantizer in (moe.quantize_rows, cases_moe.static_half, cases_moe.batch_half):
            run = cases_moe.layer_of(inputs, quantizer)
            error = cases_moe.error(inputs, run, quantizer, cases_moe.BOUND)
            assert error <= 1, f"{tokens} tokens, {quantizer.__name__}: {error:.2f} times the bound"
            yield f"{tokens} tokens, {quantizer.__name__}"


def weights() -> Iterator[str]:
    """A weight packed and fake-quantised on the GPU has the bytes of the CPU's, stacked experts included."""
    recipe = recipes.named()["quads"]
    generator = torch.Generator().manual_seed(0)
    for shape in ((48, 160), (3, 32, 64), (4, 704, 1024), (2, 256, 2048)):
        for exponent in (-30, 0, 20):
            weight = (torch.randn(shape, generator=generator) * 2.0**exponent).bfloat16()
            outer = weight.float().abs().amax(dim=(-2, -1), keepdim=weight.ndim > 2)
            outer = outer / torch.full_like(outer, 2688.0)
            cpu, gpu = qdq.pack(weight, recipe, outer), qdq.pack(weight.cuda(), recipe, outer.cuda())
            unequal(gpu.packed, cpu.packed, f"{shape} codes")
            unequal(gpu.scales, cpu.scales, f"{shape} block scales")
            values = qdq.fake_quantize(weight.cuda(), recipe, outer.cuda())
            unequal(values, qdq.fake_quantize(weight, recipe, outer), f"{shape} values")
            yield f"{shape} 2^{exponent}"
