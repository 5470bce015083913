"""What the layers of a mixture of experts cost on a chip: their kernels as `Work`, counted.

`quads.kernels` is followed closely: on Hopper both operands are decoded to bfloat16 (instructions counted in the
compiled loops), elsewhere FP4 tensor cores multiply (tiles, stages and instructions of the compiled Triton product).
Peers are modelled by bytes and FLOPs alone. Launches are counted in the source.
"""

from __future__ import annotations

from functools import cache
from math import ceil

import numpy as np

from quads.bench import compiled, counts
from quads.bench.specs import Chip
from quads.bench.work import Work

ISSUED = 0.52  # of the issue slots, by ncu in the H200's decode kernel (kernels/NOTES-gemm.md)
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
Works = tuple[Work, ...]


def dense(m: int, n: int, k: int, numerics: str, chip: Chip, *, ratio: float = 0.0, ours: bool = True) -> Works:
    """y [M, N] = x W^T; `ratio`: RAC's share of K; `ours` False: a peer's kernel in `numerics`."""
    extra = 16 * round(k / 16 * ratio)
    if not ours:
        moved, flops = counts.gemm(m, n, k, "bf16" if numerics == "w4a16" else numerics, numerics)
        return (Work(bytes=moved, flops=flops, numerics=MATRIX[numerics]),)
    moved, flops = counts.gemm(m, n, k, "nvfp4", "nvfp4", extra=extra)
    if chip.native_fp4:
        return (_native(moved, [(m, 1.0)], n, k, extra, chip),)
    way = _hopper_way(m, extra > 0)
    if way == "prefill":
        return _expanded(m, n, k + extra, flops)
    return (_hopper(moved, way, [(m, 1.0)], n, k, extra),)


def moe(
    tokens: int, hidden: int, inner: int, experts: int, top_k: int, numerics: str, chip: Chip,
    *, scope: str = "plain", ratio: float = 0.0, ours: bool = True,
) -> Works:  # fmt: skip
    """A routed SwiGLU layer with even routing; `scope`: who shares RAC's selection."""
    used = experts * (1 - (1 - top_k / experts) ** tokens)
    kind = numerics if not ours else "nvfp4"
    moved, flops = counts.moe(tokens, top_k, used, hidden, inner, kind, ratio=ratio)
    if not ours:
        return (Work(bytes=moved, flops=flops, numerics=MATRIX[numerics], launches=PEER_MOE_LAUNCHES[numerics]),)
    width = _slot_width(tokens * top_k, experts, chip)
    rows = _rows_of_experts(tokens, experts, top_k, width)
    products = []
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        share, extra = moved * n * k / (3 * inner * hidden), 16 * round(k / 16 * ratio)
        if chip.native_fp4:
            products.append(_native(share, rows, n, k, extra, chip, grouped=True))
        else:
            products.append(_hopper(share, "decode", rows, n, k, extra, grouped=True))
    small = 2 + (1 if chip.native_fp4 else 0)  # routing, weighted sum; the Triton product leaves SwiGLU to a third
    sizes = ((tokens, hidden), (tokens * top_k, inner))
    quantisers = (w for size in sizes for w in operand(*size, scope, ratio, chip))
    return (*products, Work(launches=small), *quantisers)


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


def _hopper_way(m: int, residual: bool) -> str:
    from quads.kernels.gemm import hopper_way

    return hopper_way(m, residual=residual)


def _hopper(
    moved: float, way: str, rows: list[tuple[int, float]], n: int, k: int, extra: int, *, grouped: bool = False
) -> Work:
    """Decoding both operands in registers; rows: (activation rows of a weight, how many such weights).

    A step of K skips the residual where none of its blocks is repeated.
    """
    issued = flops = 0.0
    for m, weights in rows:
        plain, rac = (compiled.product(way, "sm_90a", m, residual=r, grouped=grouped) for r in (False, True))
        steps = ceil(n / plain["rows"]) * ceil(k / plain["k"]) * ceil(m / plain["tokens"]) * plain["warps"]
        more = rac["instructions_a_step"] - plain["instructions_a_step"]
        issued += weights * steps * (plain["instructions_a_step"] + (1 - (1 - extra / k) ** (plain["k"] / 16)) * more)
        flops += weights * 2.0 * m * n * (k + extra)
    return Work(bytes=moved, flops=flops, numerics="bf16", instructions=issued, issued=ISSUED)


def _expanded(m: int, n: int, k: int, flops: float) -> Works:
    """Both operands decoded to bfloat16, then one product."""
    passes = (Work(bytes=rows * k * (2 + counts.NVFP4)) for rows in (m, n))
    return (*passes, Work(bytes=2.0 * (m * k + n * k + m * n), flops=flops, numerics="bf16"))


def _native(
    moved: float, rows: list[tuple[int, float]], n: int, k: int, extra: int, chip: Chip, *, grouped: bool = False
) -> Work:
    """The Triton product: tiles of the compiled kernel, its loop over K and, with RAC, over the repeated blocks."""
    issued = flops = blocks = requested = in_flight = 0.0
    for m, weights in rows:
        row = compiled.product("native", chip.target, m, residual=extra > 0, grouped=grouped)
        tiles = weights * ceil(n / row["rows"]) * ceil(m / row["tokens"])
        steps, again = ceil(k / row["k"]), ceil(extra / row["k"])
        step_bytes = (row["rows"] + row["tokens"]) * row["k"] * counts.NVFP4
        blocks += tiles
        issued += tiles * row["warps"] * (steps * row["instructions_a_step"] + again * (row["repeated"] or 0))
        flops += tiles * 2.0 * row["tokens"] * row["rows"] * row["k"] * (steps + again)
        requested += tiles * step_bytes * (steps + again)
        in_flight = row["stages"] * step_bytes
    return Work(
        bytes=moved, flops=flops, numerics="nvfp4", instructions=issued, blocks=blocks, requested=requested,
        in_flight=in_flight,
    )  # fmt: skip


def _slot_width(pairs: int, experts: int, chip: Chip) -> int:
    """Rows of a block of one expert, as quads.kernels.moe chooses them."""
    if chip.native_fp4:
        return int(compiled.product("native", chip.target, 1, residual=False, grouped=True)["tokens"])
    return next((w for w in (8, 16, 24) if pairs <= 0.7 * w * experts), 32)


@cache
def _rows_of_experts(tokens: int, experts: int, top_k: int, width: int) -> list[tuple[int, float]]:
    """(width, expected number of blocks of that many rows): the rows of an expert are binomial."""
    from scipy.stats import binom

    rows = np.arange(1, tokens + 1)
    blocks = experts * float(np.sum(binom.pmf(rows, tokens, top_k / experts) * np.ceil(rows / width)))
    return [(width, blocks)]
