"""Matrix products: inputs that tell accumulators apart, the arithmetics a kernel may have, and what each gives.

Gaussian data is summed exactly by every accumulator; these operands have random raw codes under scales of all
exponents, single terms whose rounding shows in a whole output, and shapes around tile edges. An arithmetic is an
order and rounding of the K sum, and an epilogue; which one a kernel has is a finding, not a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor

from quads.conformance.protocol import DTYPES, Protocol
from quads.emulation import gemm, layout
from quads.emulation.quantizers import BLOCK, NVFP4Tensor, unscaled

STEP = 64
ONE = 0x38  # the E4M3 byte of 1.0
Accumulate = Callable[[NVFP4Tensor, NVFP4Tensor], Tensor]
Epilogue = Callable[[Tensor, Tensor, torch.dtype], Tensor]


@dataclass(frozen=True)
class ProductCase:
    """A [M, K] times B [N, K] transposed, times alpha, in `dtype`. `poison` fills padding rows of swizzled scales."""

    name: str
    group: str
    a: NVFP4Tensor
    b: NVFP4Tensor
    alpha: Tensor
    dtype: torch.dtype
    poison: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)  # by accumulation


@dataclass(frozen=True)
class Arithmetic:
    """How a product sums and casts. native: the modelled tensor-core arithmetic, up to the order of its steps."""

    name: str
    sum_name: str
    accumulate: Accumulate
    epilogue: Epilogue
    native: bool = False


@dataclass(frozen=True)
class ProductQuestion:
    """A case under an arithmetic."""

    case: ProductCase
    arithmetic: Arithmetic
    protocol: Protocol


def correct(q: ProductQuestion) -> Tensor:
    """The arithmetic's own answer [M, N]."""
    return q.arithmetic.epilogue(accumulated(q), q.case.alpha, q.case.dtype)


def accumulated(q: ProductQuestion) -> Tensor:
    """FP32 accumulators [M, N]; three epilogues ask for each."""
    sums, name = q.case.sums, q.arithmetic.sum_name
    if name not in sums:
        sums[name] = q.arithmetic.accumulate(q.case.a, q.case.b)
    return sums[name]


def bits_differ(got: Tensor, want: Tensor) -> Tensor:
    """Outputs whose bits differ (bool); any NaN equals any other."""
    integer = torch.int32 if got.dtype == torch.float32 else torch.int16
    return (got.view(integer) != want.contiguous().view(integer)) & ~(got.isnan() & want.isnan())


def _split(parts: int, a: NVFP4Tensor, b: NVFP4Tensor) -> Tensor:
    steps = -(-a.codes.shape[-1] // STEP)
    return gemm.matmul(a, b, split_k=min(parts, steps))


def _descending(a: NVFP4Tensor, b: NVFP4Tensor) -> Tensor:
    return gemm.matmul(*(_reversed(_filled(x)) for x in (a, b)))


def _filled(q: NVFP4Tensor) -> NVFP4Tensor:
    missing = -q.codes.shape[-1] % STEP
    pad = torch.nn.functional.pad
    return NVFP4Tensor(pad(q.codes, (0, missing)), pad(q.scales, (0, missing // BLOCK)), q.outer)


def _reversed(q: NVFP4Tensor) -> NVFP4Tensor:
    def turned(x: Tensor, step: int) -> Tensor:
        return x.unflatten(-1, (-1, step)).flip(-2).flatten(-2)

    return NVFP4Tensor(turned(q.codes, STEP), turned(q.scales, STEP // BLOCK), q.outer)


def _nearest_chain(step: int, dtype: torch.dtype, a: NVFP4Tensor, b: NVFP4Tensor) -> Tensor:
    """Exact sums of `step` products, added to an accumulator of `dtype` with rounding to nearest."""
    x, w = (unscaled(_unsigned(_filled(q))).double() for q in (a, b))
    acc = torch.zeros(x.shape[0], w.shape[0], dtype=dtype)
    for start in range(0, x.shape[1], step):
        part = x[:, start : start + step] @ w[:, start : start + step].T
        acc = (acc.double() + part).to(dtype)
    return acc.float()


def _rounded_once(a: NVFP4Tensor, b: NVFP4Tensor) -> Tensor:
    x, w = (unscaled(_unsigned(q)).double() for q in (a, b))
    return (x @ w.T).float()


def _unsigned(q: NVFP4Tensor) -> NVFP4Tensor:
    """Scale bytes as the tensor core reads them: bit 7 ignored."""
    return NVFP4Tensor(q.codes, q.scales & 0x7F, q.outer)


def cast_first(acc: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
    """The accumulator is rounded to the output dtype before alpha, which is applied in that dtype (torchao)."""
    return acc.to(dtype) * alpha.to(dtype)


def cast_first_float(acc: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
    """The accumulator is rounded to the output dtype before alpha, which is applied in FP32."""
    return (acc.to(dtype).float() * alpha).to(dtype)


_SUMS: dict[str, tuple[Accumulate, bool]] = {
    "sequential": (gemm.matmul, True),
    "split-K 2": (partial(_split, 2), True),
    "split-K 4": (partial(_split, 4), True),
    "descending": (_descending, True),
    "dead groups count": (
        partial(gemm.matmul, model=gemm.NVFP4.replace(dead_group="included")),
        True,
    ),
    "25 bits": (partial(gemm.matmul, model=gemm.NVFP4.replace(fraction_bits=25)), False),
    "FP32 nearest, steps of 64": (partial(_nearest_chain, 64, torch.float32), False),
    "FP32 nearest, steps of 16": (partial(_nearest_chain, 16, torch.float32), False),
    "exact, rounded once": (_rounded_once, False),
    "BF16 accumulator": (partial(_nearest_chain, 64, torch.bfloat16), False),
    "FP16 accumulator": (partial(_nearest_chain, 64, torch.float16), False),
}
_CASTS: dict[str, Epilogue] = {
    "": gemm.epilogue,
    ", cast before alpha": cast_first_float,
    ", cast before alpha in the output dtype": cast_first,
}


def arithmetics() -> dict[str, Arithmetic]:
    """Every sum with every cast, the tensor core's own first."""
    return {
        sum_name + cast_name: Arithmetic(sum_name + cast_name, sum_name, total, cast, native and not cast_name)
        for cast_name, cast in _CASTS.items()
        for sum_name, (total, native) in _SUMS.items()
    }


@lru_cache(maxsize=2)
def product_cases(protocol: Protocol) -> tuple[ProductCase, ...]:
    """All cases, in every output dtype of the protocol; made once, for they keep their sums."""
    return tuple(_cases(protocol))


def _cases(protocol: Protocol) -> Iterator[ProductCase]:
    for name in protocol.dtypes:
        dtype = DTYPES[name]
        for shape in ((128, 128, 256), (128, 128, 64), (1, 128, 464), (5, 24, 80), (33, 136, 208), (129, 257, 192)):
            m, n, k = (
                _up(s, u) for s, u in zip(shape, (protocol.row_multiple,) * 2 + (protocol.k_multiple,), strict=True)
            )
            a, b = raw(m, k, seed=m + k), raw(n, k, seed=n + 7 * k)
            yield ProductCase(f"shape/{m}x{n}x{k}", "shape", a, b, scalar(1 / 3), dtype)
            if protocol.layout != "linear":
                yield ProductCase(f"poison/{m}x{n}x{k}", "poison", a, b, scalar(1 / 3), dtype, poison=0x7F)
        for spread in (4, 9, 15):
            a, b = raw(32, 1024, seed=spread, spread=spread), raw(32, 1024, seed=100 + spread, spread=spread)
            for alpha in (1.0, 1.2345678e-3):
                yield ProductCase(f"order/2^{spread}, alpha {alpha:g}", "order", a, b, scalar(alpha), dtype)
        yield ProductCase("alpha/overflow", "alpha", raw(32, 128, seed=3), raw(32, 128, seed=4), scalar(1e36), dtype)
        yield ProductCase("alpha/small", "alpha", raw(32, 128, seed=5), raw(32, 128, seed=6), scalar(2.0**-120), dtype)
        yield from _directed(dtype)


def _directed(dtype: torch.dtype) -> Iterator[ProductCase]:
    """One output each, in row 0 and column 0 of a 32 x 32 product; numbers of steps differ."""
    half, one, six = 1, 2, 7
    big, tiny = (six, 0x7E, six, 0x7E), (half, 0x01, half, 0x01)
    chains: dict[str, list[list[tuple[int, int, int, int]]]] = {
        # each step: (code a, scale a, code b, scale b) of its four groups
        "large then small": [[big], [(one, ONE, half, ONE)], [(one, 0x28, half, 0x10)]],
        "cancels to the small term": [[big], [tiny], [(six | 8, 0x7E, six, 0x7E)]],
        "small terms under a large one": [
            [(six, 0x70, six, 0x70)],
            [(half, 0x08, half, 0x08)],
            [(half, 0x08, half | 8, 0x08)],
        ],
        "dead group of large scales": [[tiny], [(0, 0x7E, 0, 0x7E)]],
        "NaN scale": [[(one, ONE, one, ONE)], [(0, 0x7F, one, ONE)]],
        "NaN scale with its sign": [[(one, ONE, one, ONE)], [(0, 0xFF, one, ONE)]],
        "scale with its sign": [[(six, 0xB8, six, ONE)]],
        "minus zero": [[(8, ONE, one, ONE)]],
        "smallest product": [[tiny]],
        "sum of -1 and 1": [[(one, ONE, one | 8, ONE), (one, ONE, one, ONE)]],
        "largest sum": [[big] * 4],
    }
    for name, steps in chains.items():
        a, b = _chain(steps)
        yield ProductCase(f"directed/{name}", "directed", a, b, scalar(1.0), dtype)


def _chain(steps: list[list[tuple[int, int, int, int]]]) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    k = STEP * max(2, len(steps))
    a, b = (NVFP4Tensor(_bytes(32, k), _bytes(32, k // BLOCK, ONE), scalar(1.0)) for _ in range(2))
    for step, groups in enumerate(steps):
        for group, (code_a, scale_a, code_b, scale_b) in enumerate(groups):
            block = step * STEP // BLOCK + group
            filled = BLOCK if len(groups) == 4 else 1
            a.codes[0, block * BLOCK : block * BLOCK + filled], a.scales[0, block] = code_a, scale_a
            b.codes[0, block * BLOCK : block * BLOCK + filled], b.scales[0, block] = code_b, scale_b
    return a, b


def raw(rows: int, k: int, *, seed: int, spread: int = 6) -> NVFP4Tensor:
    """Raw codes and scale bytes by an integer hash: every code, scale exponents over `spread` binades, no NaN."""
    codes = hashed(rows, k, seed) & 15
    scales = hashed(rows, k // BLOCK, seed + 1)
    exponent = 7 - spread // 2 + (scales >> 8) % (spread + 1)
    byte = (exponent.clamp(0, 15) << 3) | (scales & 7)
    return NVFP4Tensor(codes.to(torch.uint8), byte.clamp(max=0x7E).to(torch.uint8), scalar(1.0))


def hashed(rows: int, columns: int, seed: int) -> Tensor:
    """Integers in [0, 2^31) from their position and `seed`, the same on every machine."""
    value = torch.arange(rows * columns, dtype=torch.int64).reshape(rows, columns) + seed * 1_000_003
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 0x1B873593)):
        value = ((value ^ (value >> shift)) * factor) & 0x7FFFFFFF
    return value ^ (value >> 14)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def packed(q: NVFP4Tensor) -> Tensor:
    return layout.pack(q.codes)


def _bytes(rows: int, columns: int, value: int = 0) -> Tensor:
    return torch.full((rows, columns), value, dtype=torch.uint8)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
