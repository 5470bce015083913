"""Quantiser dialects as data: one frozen record names everything in which NVFP4 quantisers differ.

v is the largest magnitude of a block, g the outer scale as a multiplier (amax/2688), gs as a divisor (2688/amax),
s the decoded block scale. `quads.emulation.quantizers` is the one engine that reads these fields; dialects.toml
holds the named dialects. Every field is enumerated: an unknown key or value is a ValueError that names it.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

BLOCK = 16  # elements that share a block scale, along K

_TABLE = Path(__file__).with_name("dialects.toml")

CHOICES: dict[str, tuple[Any, ...]] = {
    "evidence": ("contract", "library", "source", "page"),
    "outer": ("amax/max", "max/amax", "max*(1/amax)", "one"),
    "outer_guard": ("one", "flt_max", "tiny", "none"),
    "observer": ("float32", "input"),
    "granularity": ("tensor", "token"),
    "tile": ("1x16", "16x16"),
    "scale": ("v/6/g", "v/(6*g)", "v/6*gs", "gs*(v*rcp6)", "v*(gs*rcp6)"),
    "zero_scale": ("keep", "zero", "one", "eighth"),
    "multiplier": (
        "x/(s*g)",
        "x/(s/gs)",
        "x*rcp(s*rcp(gs))",
        "x*(gs/s)",
        "x*bf16(gs/s)",
    ),
    "underflow": ("zero_step", "zero_scale", "positive_zero", "zero_block", "flt_max", "1e-8", "none"),
    "pre_round": ("none", "bf16"),
    "zero_sign": ("kept", "dropped"),
    "nan_max": ("propagate", "ignore"),
    "nonfinite": ("refuse", "follow"),
    "reciprocal": ("exact", "table", "+1ulp", "-1ulp"),
    "flush": (False, True),
    "rule": ("six", "mse", "mae", "abs_max"),
    "error": ("q*s*g", "q*s*amax/max"),
    "error_sum": ("sequential", "torch"),
    "outer_max": (448, 256),
    "scale_floor": (0.0, 2.0**-6, 2.0**-9),
    "nan": ("six", "zero", "undefined"),
    "overflow": ("saturate", "wrap"),
}


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """What one NVFP4 quantiser computes.

    source: what was read or compared, with its version. evidence: `contract` (this project's own definition),
        `library` (compared byte for byte with the installed library), `source` (read, not run), `page` (second hand).
    outer: how the outer scale follows from amax, max being 6 * outer_max; a dialect that divides by amax keeps the
        divisor gs. `one` is one-level scaling, g = 1.
    outer_guard: amax that gives no usable outer scale: `one` (amax 0 -> 1), `flt_max` (cut at FLT_MAX, 0 -> 1),
        `tiny` (amax at least the smallest normal; NaN or Inf -> 1), `none` (whatever the division gives).
    outer_max: E4M3 value that amax is mapped to; 256 leaves room for the 4 of four-over-six.
    observer: dtype in which the outer scale and v/6 are computed: float32, or the input's.
    granularity, tile: who shares an outer scale, and who shares a block scale.
    scale: association of the block scale; a form that names gs has gs = 1/g where the multiplier is what is kept.
    scale_floor: lower clamp before the cast to E4M3.
    zero_scale: a block scale of zero becomes 1 before the cast (`one`) or 0.125 after it (`eighth`); `zero` keeps the
        scale of v = 0 at zero even where the outer scale is Inf.
    multiplier: how an element is scaled to the E2M1 grid; rcp is the pluggable reciprocal.
    underflow: what that does where the block scale is 0: code 0 with the sign kept where s * g = 0 (`zero_step`) or
        s = 0 (`zero_scale`), code 0 without it (`positive_zero`), code 0 only where v = 0 (`zero_block`), multiplier
        cut at FLT_MAX (`flt_max`), multiplier 1e-8, or nothing.
    pre_round: rounding before the one to E2M1. zero_sign: whether -0.0 keeps its sign. nan: code of NaN; `undefined`
        where the library converts NaN to an integer (encoded as six here). overflow: |y| >= 7 becomes 6, or (`wrap`)
        loses its third exponent bit into the sign, Inf to no defined code.
    nan_max: whether maxima see NaN. nonfinite: whether NaN and Inf are refused.
    reciprocal: see `quads.emulation.reciprocal`. flush: FP32 subnormals flushed to zero (fast-math).
    rule: absmax to 6, or the better of 6 and 4 by mse, mae or abs_max; ties to 6. error, error_sum: how it is computed.
    """

    name: str
    source: str
    evidence: str
    outer: str = "amax/max"
    outer_guard: str = "one"
    outer_max: int = 448
    observer: str = "float32"
    granularity: str = "tensor"
    tile: str = "1x16"
    scale: str = "v/6/g"
    scale_floor: float = 0.0
    zero_scale: str = "keep"
    multiplier: str = "x/(s*g)"
    underflow: str = "zero_step"
    pre_round: str = "none"
    zero_sign: str = "kept"
    nan: str = "six"
    overflow: str = "saturate"
    nan_max: str = "propagate"
    nonfinite: str = "follow"
    reciprocal: str = "exact"
    flush: bool = False
    rule: str = "six"
    error: str = "q*s*g"
    error_sum: str = "sequential"

    def __post_init__(self) -> None:
        for field, choices in CHOICES.items():
            value = getattr(self, field)
            if value not in choices:
                known = ", ".join(str(choice) for choice in choices)
                raise ValueError(f"dialect {self.name!r}: {field} = {value!r} is not one of {known}")
        if self.tile == "16x16" and self.granularity == "token":
            raise ValueError(f"dialect {self.name!r}: a 16x16 tile spans rows, so granularity cannot be 'token'")

    @property
    def encodes(self) -> bool:
        """Whether the outer scale is kept as the divisor gs."""
        return self.outer.startswith("max")

    def replace(self, **changes: Any) -> Dialect:
        """A copy with `changes`, checked again."""
        return dataclasses.replace(self, **changes)


EXACT = Dialect(name="exact", source="this project's contract", evidence="contract", nonfinite="refuse")


@cache
def named() -> dict[str, Dialect]:
    """The named dialects, `exact` first, in the order of dialects.toml."""
    dialects = {"exact": EXACT}
    for name, fields in tomllib.loads(_TABLE.read_text("utf-8")).items():
        dialects[name] = _from_table(name, dict(fields), dialects)
    return dialects


def load(dialect: str | Dialect) -> Dialect:
    """A dialect by name; a Dialect is returned as it is."""
    if isinstance(dialect, Dialect):
        return dialect
    if dialect == "exact":
        return EXACT
    if dialect not in named():
        near = difflib.get_close_matches(dialect, named(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"named: {', '.join(named())}"
        raise ValueError(f"no dialect named {dialect!r}; {hint}")
    return named()[dialect]


def _from_table(name: str, fields: dict[str, Any], dialects: dict[str, Dialect]) -> Dialect:
    """`like = "<earlier dialect>"` starts from that dialect's fields."""
    base = dataclasses.asdict(dialects[fields.pop("like")]) if "like" in fields else {}
    known = [field.name for field in dataclasses.fields(Dialect)]
    for key in fields:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ValueError(f"dialect {name!r}: field {key!r} is unknown; did you mean {near[0] if near else known}?")
    return Dialect(**{**base, **fields, "name": name})
