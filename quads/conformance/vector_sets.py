"""What the golden vectors are: inputs and results of quantisers, layouts, tensor-core steps, products, experts.

Names are paths: `quantize/<input>/x`, `quantize/<input>/<dialect>/{packed,scales,outer,values}`, `layout/...`,
`mma/<case>/...`, `gemm/<case>/...`, `moe/<case>/...`. FP32 accumulators and steps are stored as int32 words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quads.conformance import cases, grouped, products
from quads.conformance.protocol import Protocol
from quads.emulation import dialects, gemm, layout, mma, quantizers
from quads.emulation.dialects import BLOCK, EXACT, Dialect
from quads.emulation.quantizers import NVFP4Tensor

_EVIDENCE = {
    "contract": "contract: this project's definition",
    "library": "library equality",
    "source": "source read, not run",
    "page": "second hand",
}
_MODEL = "published model: mmasim 2.1.1 GST-FDPA"
_OPEN = "assumption: not established on hardware"
_EPILOGUE = "published model: mmasim 2.1.1; epilogue as CUTLASS, vLLM and FlashInfer have it"
_OWN = Protocol(outer="own")


@dataclass(frozen=True)
class Vector:
    """One tensor, what it is, and how well it is known."""

    tensor: Tensor
    meaning: str
    evidence: str


def all_vectors() -> dict[str, Vector]:
    """Every golden vector, by name."""
    parts = (_quantize, _layouts, _steps, _products, _experts)
    return {name: vector for part in parts for name, vector in part()}


def _inputs() -> dict[str, Tensor]:
    """Few matrices under one amax each; rows in multiples of 16, so that tiles of 16x16 apply."""
    found = {
        "special": _special(),
        "ties": _group("ties", torch.bfloat16),
        "packing": _group("packing", torch.bfloat16),
    }
    for amax in (2.03125, 2.1875):
        x = cases.enumeration(amax, EXACT, _OWN, torch.bfloat16).x
        associated = [v for a, v in cases.ASSOCIATIONS if a == amax]
        rows = [x[0:1], *(_row_of(x, v) for v in associated), x[1::96]]
        found[f"bf16 {amax}"] = _filled(torch.cat(rows))
    found["fp32 2.5"] = _filled(cases.enumeration(2.5, EXACT, _OWN, torch.float32).x[::96])
    found["tails"] = cases.mixed(48, 80, torch.bfloat16)
    return {name.replace(" ", "-"): x for name, x in found.items()}


def _special() -> Tensor:
    group = [case.x for case in cases.directed(_OWN, torch.bfloat16) if case.group == "special"]
    rows = torch.cat([x for x in group if float(x.abs().amax()) == 2.5])
    return _filled(rows[(rows.view(torch.int16) != 0).any(-1)])


def _group(name: str, dtype: torch.dtype) -> Tensor:
    return next(case.x for case in cases.directed(_OWN, dtype) if case.group == name)


def _row_of(x: Tensor, v: float) -> Tensor:
    return x[(x[:, 0].abs().float() == v).nonzero()[0]]


def _filled(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % BLOCK))


def _quantize() -> Iterator[tuple[str, Vector]]:
    for name, x in _inputs().items():
        yield f"quantize/{name}/x", Vector(x, "input [M, K]", "input")
        for d in dialects.named().values():
            if d.error_sum != "torch":  # the order of torch's sum is its build's
                yield from _quantized(f"quantize/{name}/{d.name}", x, d)


def _quantized(path: str, x: Tensor, d: Dialect) -> Iterator[tuple[str, Vector]]:
    trace = quantizers.trace(x, dialect=d)
    own = trace.steps["gs" if d.encodes else "g"]
    evidence = f"{_EVIDENCE[d.evidence]}: {d.source}"
    yield f"{path}/packed", Vector(trace.result.packed, "codes [M, K/2], even K index in the low nibble", evidence)
    yield f"{path}/scales", Vector(trace.result.scales, "E4M3 block scales [M, K/16], row-major", evidence)
    what = "divisor 2688/amax" if d.encodes else "multiplier amax/2688"
    yield f"{path}/outer", Vector(own, f"outer scale, as the dialect keeps it ({what})", evidence)
    if d.name == "exact":
        values = quantizers.dequantize(trace.result)
        yield f"{path}/values", Vector(values, "fl(fl(code * scale) * outer), float32", evidence)


def _layouts() -> Iterator[tuple[str, Vector]]:
    scales = ((products.hashed(129, 13, seed=5) % 126) + 1).to(torch.uint8)
    counts = [0, 3, 9, 0, 1]
    yield "layout/linear", Vector(scales, "block scales [129, 13]", "input")
    for name, form in layout.LAYOUTS.items():
        swizzled = layout.swizzle(scales, form)
        yield f"layout/{name}", Vector(swizzled, f"layout/linear in the {name} layout, zero padding", "vendor document")
    rows = scales[: sum(counts)]
    yield "layout/grouped/linear", Vector(rows, "block scales of experts in order", "input")
    yield "layout/grouped/counts", Vector(torch.tensor(counts, dtype=torch.int32), "rows of each expert", "input")
    grouped_scales = layout.swizzle_grouped(rows, counts)
    meaning = "each expert from a 128-row tile of its own, 128x4"
    yield "layout/grouped/128x4", Vector(grouped_scales, meaning, "vendor document")


def _steps() -> Iterator[tuple[str, Vector]]:
    """Chains of 64-steps without C, and single steps with C (the directed vectors of the published model)."""
    for case in products.product_cases(Protocol(dtypes=("float32",))):
        if case.group == "directed":
            name = case.name.split("/")[1].replace(" ", "-")
            a, b = _first_row(case.a), _first_row(case.b)
            open_ = name == "dead-group-of-large-scales"
            yield from _step(f"mma/{name}", a, b, 0, _OPEN if open_ else _MODEL)
    zeros = NVFP4Tensor(
        torch.zeros(1, 64, dtype=torch.uint8), torch.full((1, 4), products.ONE, dtype=torch.uint8), _ONE
    )
    large = NVFP4Tensor(zeros.codes, torch.full((1, 4), 0x7E, dtype=torch.uint8), _ONE)
    yield from _step("mma/dead-groups-under-a-small-C", large, large, 0x35800000, _OPEN)
    yield from _step("mma/large-C", _codes({0: 2, 16: 1}), _codes({0: 2, 16: 2}), 0x4B800000, _MODEL)
    yield from _step("mma/minus-zero-C", zeros, zeros, -0x80000000, _MODEL)
    yield from _step("mma/cancelled-C", _codes({0: 2}), _codes({0: 2}), 0xBF800000 - (1 << 32), _MODEL)


_ONE = torch.tensor(1.0)


def _codes(at: dict[int, int]) -> NVFP4Tensor:
    codes = torch.zeros(1, 64, dtype=torch.uint8)
    for index, code in at.items():
        codes[0, index] = code
    return NVFP4Tensor(codes, torch.full((1, 4), products.ONE, dtype=torch.uint8), _ONE)


def _first_row(q: NVFP4Tensor) -> NVFP4Tensor:
    return NVFP4Tensor(q.codes[:1], q.scales[:1], q.outer)


def _step(path: str, a: NVFP4Tensor, b: NVFP4Tensor, c: int, evidence: str) -> Iterator[tuple[str, Vector]]:
    start = torch.tensor([[c]], dtype=torch.int32)
    words = mma.chain(mma.Operand(a.codes, a.scales), mma.Operand(b.codes, b.scales), gemm.NVFP4, start)
    yield from _operands(path, a, b)
    yield f"{path}/c", Vector(start, "FP32 word of the accumulator before", "input")
    yield f"{path}/d", Vector(words, "FP32 word after K/64 steps in ascending order", evidence)


def _operands(path: str, a: NVFP4Tensor, b: NVFP4Tensor) -> Iterator[tuple[str, Vector]]:
    for name, q in (("a", a), ("b", b)):
        yield f"{path}/{name}_packed", Vector(layout.pack(q.codes), "codes, even K index in the low nibble", "input")
        yield f"{path}/{name}_scales", Vector(q.scales, "E4M3 block scales, row-major", "input")


def _products() -> Iterator[tuple[str, Vector]]:
    for spread in (4, 15):
        a, b = products.raw(16, 512, seed=spread, spread=spread), products.raw(16, 512, seed=9 + spread, spread=spread)
        path, alpha = f"gemm/spread-{spread}", torch.tensor(1.2345678e-3)
        acc = gemm.matmul(a, b)
        yield from _operands(path, a, b)
        yield f"{path}/alpha", Vector(alpha, "float32 factor of the epilogue", "input")
        yield f"{path}/accumulator", Vector(acc.view(torch.int32), "FP32 words of A B^T before alpha", _MODEL)
        out = gemm.epilogue(acc, alpha)
        yield f"{path}/output", Vector(out, "RNE_bf16(fl(alpha * accumulator))", _EPILOGUE)


def _experts() -> Iterator[tuple[str, Vector]]:
    counts, k, n = (0, 3, 17, 0, 2, 1, 0), 128, 32
    a = products.raw(sum(counts), k, seed=77)
    each = [products.raw(n, k, seed=500 + expert) for expert in range(len(counts))]
    w = NVFP4Tensor(torch.stack([x.codes for x in each]), torch.stack([x.scales for x in each]), _ONE)
    alphas = 1.0 / (3.0 + torch.arange(2 * len(counts)).reshape(-1, 2).float())
    case = grouped.GroupedCase("experts", "ragged", a, w, alphas, counts, torch.bfloat16)
    out = grouped.correct(grouped.GroupedQuestion(case, products.arithmetics()["sequential"], Protocol(shards=2)))
    yield from _operands("moe/ragged", a, w)
    yield "moe/ragged/counts", Vector(torch.tensor(counts, dtype=torch.int32), "rows of each expert", "input")
    yield "moe/ragged/alphas", Vector(alphas, "float32 [experts, 2]: first and second half of N", "input")
    yield "moe/ragged/output", Vector(out, "bfloat16 [rows, N]", _EPILOGUE)
