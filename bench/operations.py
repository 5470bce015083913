"""The benchmark's cases as kernels on a chip: from operation, numerics, implementation, variant and shape to `Work`."""

from __future__ import annotations

from collections.abc import Callable

from quads.bench import compiled, counts, layers
from quads.bench.layers import Works
from quads.bench.specs import Chip
from quads.bench.work import Work

OURS = "quads.kernels"
Shape = dict[str, int]


def works(op: str, numerics: str, implementation: str, variant: str, shape: Shape, chip: Chip) -> Works | None:
    """The kernels of a case on a chip; None where nothing is modelled. The names are those of the results."""
    make = _MODELS.get(op)
    peer = implementation != OURS
    if make is None or (peer and numerics not in layers.MATRIX) or implementation.startswith("quads.emulation"):
        return None
    return make(numerics, implementation, variant, shape, chip)


def _gemm(numerics: str, implementation: str, variant: str, shape: Shape, chip: Chip) -> Works | None:
    m, n, k = shape["M"], shape["N"], shape["K"]
    ours, ratio = implementation == OURS, _ratio(variant)
    made = layers.dense(m, n, k, numerics, chip, ratio=ratio, ours=ours)
    if "from bf16" not in variant:
        return made
    if ours:
        return (*layers.operand(m, k, "static", ratio, chip), *made)
    return (Work(bytes=m * k * (2.0 + counts.BYTES[numerics])), *made)


def _moe(numerics: str, implementation: str, variant: str, shape: Shape, chip: Chip) -> Works | None:
    sizes = (shape["tokens"], shape["hidden"], shape["inner"], shape["experts"], shape["top_k"])
    scope = variant.split()[-1] if variant else "plain"
    return layers.moe(*sizes, numerics, chip, scope=scope, ratio=_ratio(variant), ours=implementation == OURS)


def _quantize(numerics: str, implementation: str, variant: str, shape: Shape, chip: Chip) -> Works | None:
    source = variant if variant in ("fp16", "fp32") else "bf16"
    if implementation != OURS:
        return None
    return layers.quantised(shape["M"] * shape["K"], variant, chip, source=source)


def _quantize_rac(numerics: str, implementation: str, variant: str, shape: Shape, chip: Chip) -> Works | None:
    if implementation != OURS:
        return None
    if numerics == "nvfp4":
        return layers.quantised(shape["M"] * shape["K"], variant, chip)
    known = "amax in the pass" not in variant
    return layers.compensated(shape["M"], shape["K"], variant.split()[-1], _ratio(variant), chip, known_outer=known)


def _fake_quantize(numerics: str, implementation: str, variant: str, shape: Shape, chip: Chip) -> Works | None:
    if implementation != OURS:
        return None
    elements, kernel = shape["M"] * shape["K"], "fake-quantize 16x16" if variant == "16x16" else "fake-quantize"
    mean = compiled.quantizer(kernel, chip.target)["instructions_an_element"]
    return (Work(bytes=4.0 * elements, instructions=elements / 32 * mean),)


def _outer_scale(numerics: str, implementation: str, variant: str, shape: Shape, chip: Chip) -> Works | None:
    return (Work(bytes=2.0 * shape["M"] * shape["K"], launches=4),) if implementation == OURS else None


def _refit(numerics: str, implementation: str, variant: str, shape: Shape, chip: Chip) -> Works | None:
    """Amax, then quantise in place, of every expert tensor; a bfloat16 refit copies."""
    tensors, elements = 2 * shape["layers"], shape["experts"] * shape["hidden"] * shape["inner"] * 3 // 2
    if numerics == "bf16":
        return tuple(Work(bytes=4.0 * elements) for _ in range(tensors))
    amax = Work(bytes=2.0 * elements, launches=5)
    return tuple(work for _ in range(tensors) for work in (amax, *layers.quantised(elements, "token", chip)))


def _ratio(variant: str) -> float:
    """RAC's share, of variants that begin with it in per cent."""
    return float(variant.split()[0]) / 100 if variant[:1].isdigit() and "%" in variant else 0.0


_MODELS: dict[str, Callable[[str, str, str, Shape, Chip], Works | None]] = {
    "gemm": _gemm, "moe": _moe, "quantize": _quantize, "quantize_rac": _quantize_rac,
    "fake_quantize": _fake_quantize, "outer_scale": _outer_scale, "refit": _refit,
}  # fmt: skip
