"""What the layers of a mixture of experts cost on a chip: their kernels as `Work`, counted.

`quads.kernels` is followed closely, products in quads.bench.products, quantisers here. Peers are modelled by bytes and
FLOPs alone. Launches are counted in the source.
"""

from __future__ import annotations

from math import ceil

from quads.bench import compiled, counts, products
from quads.bench.products import Product, Routing, Works
from quads.bench.specs import Chip
from quads.bench.work import Work

MATRIX = {"bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "w4a16": "bf16"}  # what a peer's products multiply in
LAUNCHES = {
    "static": 3,
    "batch": 5,
    "tile": 6,
    "token": 1,
}  # of quantising with RAC, outer scales known (compensate.py)
ROUNDS = 63  # of a selection: it finds a threshold bit by bit
ROUND_S = (0.15e-6, 0.23e-6)  # by one warp, by several; fitted on the H200's quantize_rac cases of scope `token`
PEER_MOE_LAUNCHES = {
    "bf16": 6,
    "w4a16": 6,
    "fp8_block": 8,
    "fp8": 8,
}  # FP8 quantises twice


def dense(m: int, n: int, k: int, numerics: str, chip: Chip, *, ratio: float = 0.0, ours: bool = True) -> Works:
    """y [M, N] = x W^T; `ratio`: RAC's share of K; `ours` False: a peer's kernel in `numerics`."""
    extra = 16 * round(k / 16 * ratio)
    if not ours:
        moved, flops = counts.gemm(m, n, k, "bf16" if numerics == "w4a16" else numerics, numerics)
        return (Work(bytes=moved, flops=flops, numerics=MATRIX[numerics]),)
    moved, _ = counts.gemm(m, n, k, "nvfp4", "nvfp4", extra=extra)
    return products.dense(m, Product(n=n, k=k, extra=extra, moved=moved), chip)


def moe(
    tokens: int, hidden: int, inner: int, experts: int, top_k: int, numerics: str, chip: Chip,
    *, scope: str = "plain", ratio: float = 0.0, ours: bool = True,
) -> Works:  # fmt: skip
    """A routed SwiGLU layer with even routing; `scope`: who shares RAC's selection."""
    routing = Routing(tokens=tokens, experts=experts, top_k=top_k)
    kind = numerics if not ours else "nvfp4"
    moved, flops = counts.moe(tokens, top_k, routing.used, hidden, inner, kind, ratio=ratio)
    if not ours:
        return (Work(bytes=moved, flops=flops, numerics=MATRIX[numerics], launches=PEER_MOE_LAUNCHES[numerics]),)
    both = [
        Product(n=n, k=k, extra=16 * round(k / 16 * ratio), moved=moved * n * k / (3 * inner * hidden), swiglu=swiglu)
        for n, k, swiglu in ((2 * inner, hidden, True), (hidden, inner, False))
    ]
    sizes = ((tokens, hidden), (routing.pairs, inner))
    multiplied = (w for (rows, _), p in zip(sizes, both, strict=True) for w in products.routed(routing, rows, p, chip))
    quantisers = (w for size in sizes for w in operand(*size, scope, ratio, chip))
    return (*multiplied, _around(routing, both[1], chip), *quantisers)


def _around(routing: Routing, w2: Product, chip: Chip) -> Work:
    """Routing and weighted sum, and where the Triton product leaves it to a third kernel, SwiGLU."""
    through = products.goes_through_memory(routing, w2, chip)
    moved = 2.0 * w2.n * (routing.pairs + routing.tokens) if through else 0.0
    return Work(bytes=moved, launches=3 if chip.native_fp4 else 2)


def quantised(elements: int, variant: str, chip: Chip, *, source: str = "bf16") -> Works:
    """Quantising to NVFP4; `variant` as in the catalogue."""
    kernel = {
        "128x4 scales": "quantize 128x4", "vllm dialect": "quantize vllm",
        "token, amax in the pass": "quantize token, amax in the pass",
    }.get(variant, "quantize")  # fmt: skip
    per_element = compiled.quantizer(kernel, chip.target)["instructions_an_element"]
    return (Work(bytes=counts.quantize(elements, source), instructions=elements / 32 * per_element),)


def compensated(rows: int, k: int, scope: str, ratio: float, chip: Chip, *, known_outer: bool = False) -> Works:
    """Quantising [rows, K] with the residual of `ratio` of the blocks; known_outer: the outer scales are given."""
    from quads.kernels.compensate import _FEW_ROWS, _WIDEST_ROW

    elements = rows * k
    moved = counts.quantize_rac(elements, ratio, second_pass=scope in ("batch", "tile"))

    def of(kernel: str, path: str = "instructions_an_element") -> float:
        return float(compiled.quantizer(kernel, chip.target)[path])

    if scope == "static" and not known_outer and rows <= _FEW_ROWS and k / 16 <= _WIDEST_ROW:
        issued = elements / 32 * of("RAC known list, a row a program")
        return (Work(bytes=moved, instructions=issued, blocks=rows),)
    serial = 0.0
    if scope == "static":
        mean = (1 - ratio) * of("RAC known list") + ratio * of("RAC known list", "longest_an_element")
    elif scope == "token":
        mean, warps = of("RAC token"), max(1, round(k / 16 / 128))
        resident = 65536 // (32 * warps * 8 * ceil(of("RAC token", "registers") / 8))
        serial = ceil(rows / (chip.sms.value * resident)) * _selection(k)
    else:
        mean, serial = of("RAC first pass") + ratio * of("RAC second pass"), _selection(k)
    made = (Work(bytes=moved, instructions=elements / 32 * mean, launches=LAUNCHES[scope], serial=serial),)
    return made if known_outer else (Work(bytes=2.0 * elements), *made)


def _selection(k: int) -> float:
    """Seconds in which one program selects among the blocks of K."""
    return ROUNDS * ROUND_S[k / 16 > 128]


def operand(rows: int, k: int, scope: str, ratio: float, chip: Chip) -> Works:
    """Quantising the activations [rows, K] of a product, with RAC where `ratio` is not 0."""
    if ratio:
        return compensated(rows, k, scope, ratio, chip)
    return quantised(rows * k, "token, amax in the pass", chip)
