"""Known faults of NVFP4 kernels as data: what each does to a correct result, and who reported it.

A fault is a function from a question (a case as a dialect sees it) to the answer that a kernel with that fault gives.
`diagnose` tries them all against the bits of a failing kernel. Faults of one dialect field are made from the field's
choices (`field_faults`); the others are listed in faults.toml, their arithmetic in the *_effects modules.
Evidence: public reports by project and number, as collected in the numerics notes of this project, not re-run there.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quads.conformance.protocol import Quantized
from quads.conformance.reference import Question, correct
from quads.emulation.dialects import BLOCK, CHOICES, Dialect


@dataclass(frozen=True)
class Fault:
    """name: stable identifier. summary: one line for people. kind: family of the difference. evidence: who had it."""

    name: str
    kind: str
    summary: str
    evidence: str
    effect: Callable[[Any], Any]


# (field, value) of a Dialect -> (kind, what a kernel with this value does, evidence). What is not named here is no
# fault that somebody reported, but a variation that the search names by field and value.
_KNOWN: dict[tuple[str, Any], tuple[str, str, str]] = {
    ("zero_scale", "one"): ("zero block", "a zero block gets scale byte 0x38", "ModelOpt; pytorch/ao #2604, #4598"),
    ("zero_scale", "eighth"): ("zero block", "a block scale of 0 becomes 0x20 (0.125)", "compressed-tensors"),
    ("scale_floor", 2.0**-6): ("zero block", "block scales are clamped to 2^-6 (0x08)", "torchao; pytorch/ao #2604"),
    ("scale_floor", 2.0**-9): ("zero block", "block scales are clamped to 2^-9 (0x01)", "MSLK, ModelOpt"),
    ("pre_round", "bf16"): (
        "tie",
        "elements are rounded to bfloat16 before FP4",
        "compressed-tensors before #817, #820",
    ),
    ("zero_sign", "dropped"): ("-0", "-0.0 loses its sign: code 0x0 for 0x8", "ModelOpt, TE Python reference"),
    ("zero_sign", "kept"): ("-0", "-0.0 keeps its sign: code 0x8", "vLLM, TE kernels"),
    ("nan", "zero"): ("nan", "NaN becomes code 0", "TE Python reference"),
    ("overflow", "wrap"): ("saturation", "|y| >= 7 wraps instead of saturating", "fouroversix; triton #11668"),
    ("reciprocal", "+1ulp"): ("rcp", "reciprocals are one ulp high", "rcp.approx; numerics B4"),
    ("reciprocal", "-1ulp"): ("rcp", "reciprocals are one ulp low", "rcp.approx; numerics B4"),
    ("reciprocal", "table"): ("rcp", "reciprocals are rcp.approx.ftz.f32 of an H200", "measured on an NVIDIA H200"),
    ("reciprocal", "exact"): ("rcp", "reciprocals are correctly rounded", "TE"),
    ("underflow", "none"): (
        "underflow",
        "a block scale of 0 divides: 0 * Inf = NaN becomes code 7",
        "FlashInfer #3592",
    ),
    ("underflow", "zero_block"): (
        "underflow",
        "only an all-zero block is guarded against scale 0",
        "FlashInfer fast path",
    ),
    ("underflow", "flt_max"): ("underflow", "the multiplier of a zero scale is FLT_MAX: codes saturate", "TE"),
    ("underflow", "1e-8"): ("underflow", "the divisor of a zero scale is 1e-8", "vLLM reference"),
    ("underflow", "positive_zero"): ("underflow", "a block of scale 0 loses its signs", "fouroversix"),
    ("flush", True): ("underflow", "FP32 subnormals are flushed to zero", "fast-math builds; FlashInfer"),
    ("observer", "input"): ("outer scale", "the outer scale is computed in the input's dtype", "compressed-tensors"),
    ("outer", "max*(1/amax)"): ("outer scale", "2688 / amax is computed as 2688 * (1 / amax)", "compressed-tensors"),
    ("outer", "one"): ("outer scale", "there is no outer scale (g = 1)", "imp #1544, #113; mlx #3022"),
    ("outer_max", 256): ("outer scale", "amax is mapped to 256 * 6 instead of 448 * 6", "four-over-six"),
    ("outer_guard", "none"): (
        "outer scale",
        "amax = 0 gives an Inf or NaN scale",
        "compressed-tensors #595; FlashInfer #3592",
    ),
    ("granularity", "token"): ("outer scale", "each row has an outer scale of its own", "TE row-scaled"),
    ("granularity", "tensor"): ("outer scale", "one outer scale for all rows", "per-tensor quantisers"),
    ("tile", "16x16"): ("scale", "16x16 tiles share a block scale", "TE 2-D weights"),
    ("rule", "mse"): ("scale", "blocks are scaled to 6 or 4, by squared error", "four-over-six"),
    ("rule", "mae"): ("scale", "blocks are scaled to 6 or 4, by absolute error", "four-over-six"),
    ("rule", "abs_max"): ("scale", "blocks are scaled to 6 or 4, by largest error", "four-over-six"),
    ("multiplier", "x*bf16(gs/s)"): ("tie", "the multiplier is rounded to bfloat16", "TE fast path; numerics B8"),
}
_KINDS = {"scale": "scale rounding", "multiplier": "tie", "nan_max": "nan", "nonfinite": "nan"}
_SKIP = {"evidence", "error", "error_sum", "nonfinite"}


def field_faults(base: Dialect) -> list[Fault]:
    """Every change of one field of `base`, as a fault against it."""
    return [
        _field_fault(field, value)
        for field, choices in CHOICES.items()
        if field not in _SKIP
        for value in choices
        if value != getattr(base, field) and _possible(base, field, value)
    ]


def _possible(base: Dialect, field: str, value: Any) -> bool:
    """A 16x16 tile spans rows, so it excludes an outer scale a row."""
    return not (
        (field == "granularity" and value == "token" and base.tile == "16x16")
        or (field == "tile" and value == "16x16" and base.granularity == "token")
    )


def _field_fault(field: str, value: Any) -> Fault:
    kind, summary, evidence = _KNOWN.get(
        (field, value),
        (_KINDS.get(field, field), f"{field.replace('_', ' ')} is {value}", "a choice of other dialects"),
    )

    def effect(q: Question) -> Quantized:
        changed = q.dialect.replace(**{field: value, "name": f"{q.dialect.name}, {field}={value}"})
        if not changed.multiplier.startswith("x/") and changed.underflow == "zero_step":
            changed = changed.replace(underflow="zero_scale")  # the same guard, for a multiplier
        if changed.rule != "six" and changed.error == "q*s*amax/max" and q.outer is not None:
            changed = changed.replace(error="q*s*g")
        return _whole_tiles(Question(q.x, _redirected(q, changed), changed, q.protocol))

    return Fault(f"{field}={value}", kind, summary, evidence, effect)


def _whole_tiles(q: Question) -> Quantized:
    """The correct answer; rows that do not fill a tile are filled up with zeros."""
    rows = q.x.shape[0]
    if q.dialect.tile == "1x16" or rows % BLOCK == 0:
        return correct(q)
    filled = torch.nn.functional.pad(q.x, (0, 0, 0, -rows % BLOCK))
    answer = correct(dataclasses.replace(q, x=filled))
    return Quantized(answer.codes[:rows], answer.scales[:rows], answer.padding, answer.outer)


def _redirected(q: Question, changed: Dialect) -> Any:
    """The given outer scale in the changed dialect's direction."""
    if q.outer is None or changed.encodes == q.dialect.encodes:
        return q.outer
    return 1.0 / q.outer


@cache
def table() -> dict[str, dict[str, dict[str, str]]]:
    """faults.toml: kind of callable -> name -> kind, summary, evidence."""
    return tomllib.loads(Path(__file__).with_name("faults.toml").read_text("utf-8"))


def from_table(callable_kind: str, effects: Mapping[str, Callable[[Any], Any]]) -> tuple[Fault, ...]:
    """The faults of one kind of callable, in the order of the table; each needs an effect, and the reverse."""
    rows = table()[callable_kind]
    assert set(rows) == set(effects), sorted(set(rows) ^ set(effects))
    return tuple(Fault(name=name, effect=effects[name], **row) for name, row in rows.items())


@cache
def quantizer_faults() -> tuple[Fault, ...]:
    """Faults of quantisers that are not one field of a dialect."""
    from quads.conformance import arithmetic_effects, layout_effects

    return from_table("quantizer", arithmetic_effects.EFFECTS | layout_effects.EFFECTS)


@cache
def product_faults() -> tuple[Fault, ...]:
    """Faults of matrix products."""
    from quads.conformance import product_effects

    return from_table("gemm", product_effects.EFFECTS)


@cache
def grouped_faults() -> tuple[Fault, ...]:
    """Faults of grouped products."""
    from quads.conformance import grouped_effects

    return from_table("moe", grouped_effects.EFFECTS)
