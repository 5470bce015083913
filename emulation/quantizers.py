"""NVFP4 quantisers: one engine for every dialect.

The project's own dialect, `exact`: every division is correctly rounded FP32, nothing is a reciprocal.
    g    = fl(amax / 2688)                      outer scale, decode direction (a multiplier); 1 where amax = 0
    s    = e4m3_sat(fl(fl(v / 6) / g))          block scale, v = max|x| over 16 elements along K
    code = e2m1_sat(fl(x / fl(s * g)))          0 (sign kept) where s * g = 0
    Q(x) = fl(fl(q * s) * g)                    q * s is exact
Other dialects (`quads.emulation.dialects`) differ in the fields of their record and in nothing else. Outer scales
are given and kept as multipliers, or as divisors gs by a dialect that divides by amax; the result always holds the
multiplier, fl(1 / gs) there. All arithmetic is FP32, one rounding an operation, no FMA; nothing is flushed unless a
dialect says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quads.emulation import dialects, formats, layout, reciprocal
from quads.emulation.dialects import EXACT, Dialect
from quads.emulation.reciprocal import Reciprocal

BLOCK = 16
OUTER_MAX = formats.E2M1_MAX * formats.E4M3_MAX  # 2688

Granularity = Literal["tensor", "token"]

_FLT_MAX = torch.finfo(torch.float32).max
_FLT_TINY = torch.finfo(torch.float32).tiny
_WRAPS = 7.0  # from here on, rounding to the spacing of E2M1's top binade leaves the format
_BF16_MAX = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True)
class NVFP4Tensor:
    """Codes uint8 [..., K] (a nibble each), block scales E4M3 bytes uint8 [..., K/16], outer scale float32.

    The outer scale has shape [] (per tensor) or [..., 1] (per token). Value = code * block scale * outer scale.
    """

    codes: Tensor
    scales: Tensor
    outer: Tensor

    @property
    def packed(self) -> Tensor:
        return layout.pack(self.codes)


@dataclass(frozen=True)
class Trace:
    """One quantisation with every rounded intermediate: name -> float32, of element or block shape, in order."""

    steps: dict[str, Tensor]
    result: NVFP4Tensor


@dataclass(frozen=True)
class Decided:
    """Whether bits depend on rcp: True where every reciprocal within 1 ulp gives them. [..., K] and [..., K/16]."""

    codes: Tensor
    scales: Tensor


def outer_scale(x: Tensor, granularity: Granularity | None = None, *, dialect: str | Dialect = EXACT) -> Tensor:
    """The dialect's outer scale as float32: shape [] (tensor) or [..., 1] (token).

    `exact`: g = amax / 2688, 1 where amax is 0. A dialect of the encode direction returns its divisor gs.
    """
    d = dialects.load(dialect)
    return _outer_of(_amax(_magnitude(x, d), granularity or d.granularity), d)


def quantize(
    x: Tensor,
    outer: Tensor | None = None,
    *,
    granularity: Granularity | None = None,
    dialect: str | Dialect = EXACT,
) -> NVFP4Tensor:
    """Quantise `x` [..., K] (float32, bfloat16 or float16; K % 16 == 0) to NVFP4 along K.

    `outer` overrides the outer scale (in the dialect's own direction). `granularity` overrides the dialect's.
    Raises ValueError on a bad shape, an empty tensor, and NaN or Inf where the dialect does not follow them.
    """
    return trace(x, outer, granularity=granularity, dialect=dialect).result


def trace(
    x: Tensor,
    outer: Tensor | None = None,
    *,
    granularity: Granularity | None = None,
    dialect: str | Dialect = EXACT,
    rcp: Reciprocal | None = None,
) -> Trace:
    """`quantize`, with its intermediates; `rcp` overrides the dialect's reciprocal."""
    d = dialects.load(dialect)
    check_input(x, finite=False)
    _check_tile(x, outer, d)
    rcp = rcp or reciprocal.NAMED[d.reciprocal]
    maxima = _magnitude(x, d).unflatten(-1, (-1, BLOCK)).amax(dim=-1)
    if d.nonfinite == "refuse":
        _refuse_nonfinite(maxima, x, "tensor")
    amax = _amax(maxima, granularity or d.granularity) if outer is None else None
    given = _outer_of(amax, d) if amax is not None else _as_float32(outer)
    outers = _both_directions(given, rcp, d)
    value = _flush(x.float(), d)
    blocks = value.unflatten(-1, (-1, BLOCK))
    v = _shared_max(_flush(maxima, d), d)
    base = {k: _flush(t, d) for k, t in _SCALE[d.scale](v, outers, rcp).items()}
    candidates = [_candidate(blocks, v, base, factor, outers, rcp, d) for factor in _factors(d)]
    chosen = candidates[0] if d.rule == "six" else _better(candidates, blocks, amax, outers, d)
    steps = {"v": v.float(), "gs" if d.encodes else "g": given, **chosen.steps}
    return Trace(steps, NVFP4Tensor(chosen.codes.flatten(-2), chosen.scales, outers.g))


def dequantize(q: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Q(x) = (code * block scale) * outer scale, each product rounded to float32, then one cast to `dtype`."""
    return (unscaled(q) * q.outer).to(dtype)


def unscaled(q: NVFP4Tensor) -> Tensor:
    """code * block scale as float32, exact: at most six significant bits, so exact in bfloat16 too."""
    values = formats.decode(q.codes, formats.E2M1).unflatten(-1, (-1, BLOCK))
    return (values * formats.decode(q.scales, formats.E4M3).unsqueeze(-1)).flatten(-2)


def decided(x: Tensor, outer: Tensor | None = None, *, dialect: str | Dialect) -> Decided:
    """Which codes and block scales of `x` do not depend on the bits of rcp.approx.

    True where the correctly rounded and the measured reciprocal, and every combination of +-1 ulp at the sites that
    take one, agree. A dialect whose reciprocals are exact by its own definition is decided everywhere.
    """
    d = dialects.load(dialect)
    first = trace(x, outer, dialect=d, rcp=reciprocal.NAMED["exact"]).result
    codes, scales = torch.ones_like(first.codes, dtype=torch.bool), torch.ones_like(first.scales, dtype=torch.bool)
    if d.reciprocal == "exact":
        return Decided(codes, scales)
    for rcp in (reciprocal.NAMED["table"], *reciprocal.corners()):
        other = trace(x, outer, dialect=d, rcp=rcp).result
        codes &= other.codes == first.codes
        scales &= other.scales == first.scales
    return Decided(codes, scales)


def check_input(x: Tensor, name: str = "tensor", *, finite: bool = True) -> None:
    """Raise ValueError, naming tensor and rule, where no NVFP4 quantisation of `x` is defined."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name} has dtype {x.dtype}: NVFP4 quantisation takes float32, bfloat16 or float16")
    if x.ndim == 0 or x.numel() == 0:
        raise ValueError(f"{name} of shape {tuple(x.shape)} is empty: nothing to quantise")
    if x.shape[-1] % BLOCK:
        raise ValueError(f"{name} of shape {tuple(x.shape)}: K = {x.shape[-1]} is not a multiple of {BLOCK}")
    if finite:
        _refuse_nonfinite(x.abs(), x, name)


def _refuse_nonfinite(magnitude: Tensor, x: Tensor, name: str) -> None:
    if not bool(magnitude.amax().isfinite()):  # amax hands NaN on
        raise ValueError(f"{name} of shape {tuple(x.shape)} holds NaN or Inf: refuse to quantise it")


@dataclass(frozen=True)
class _Outer:
    g: Tensor  # multiplier
    gs: Tensor  # divisor


@dataclass(frozen=True)
class _Candidate:
    steps: dict[str, Tensor]
    scales: Tensor
    codes: Tensor
    y: Tensor


_Steps = dict[str, Tensor]


def _constant(value: float, like: Tensor) -> Tensor:
    """A tensor operand: torch divides by a Python number with a reciprocal on CUDA, and Python numbers by a tensor so
    everywhere; only tensor / tensor is a correctly rounded division."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _sixth(v: Tensor) -> Tensor:
    return (v / _constant(6.0, v)).float()


def _rcp6(v: Tensor, rcp: Reciprocal) -> Tensor:
    return rcp(torch.full((), 6.0, device=v.device), "six")


_OUTER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "amax/max": lambda amax, most: amax / most,
    "max/amax": lambda amax, most: most / amax,
    "max*(1/amax)": lambda amax, most: most * (1.0 / amax),
    "one": lambda amax, most: torch.ones_like(amax),
}
# Each form names its roundings in order; the last is the result.
_SCALE: dict[str, Callable[[Tensor, _Outer, Reciprocal], _Steps]] = {
    "v/6/g": lambda v, o, rcp: {"v/6": (a := _sixth(v)), "(v/6)/g": a / o.g},
    "v/(6*g)": lambda v, o, rcp: {"6*g": (a := 6.0 * o.g), "v/(6*g)": v.float() / a},
    "v/6*gs": lambda v, o, rcp: {"v/6": (a := _sixth(v)), "(v/6)*gs": a * o.gs},
    "gs*(v*rcp6)": lambda v, o, rcp: {"v*rcp(6)": (a := v.float() * _rcp6(v, rcp)), "gs*(v*rcp(6))": o.gs * a},
    "v*(gs*rcp6)": lambda v, o, rcp: {"gs*rcp(6)": (a := o.gs * _rcp6(v, rcp)), "v*(gs*rcp(6))": v.float() * a},
}
_MULTIPLIER: dict[str, Callable[[Tensor, _Outer, Reciprocal], _Steps]] = {
    "x/(s*g)": lambda s, o, rcp: {"s*g": s * o.g},
    "x/(s/gs)": lambda s, o, rcp: {"s/gs": s / o.gs},
    "x*rcp(s*rcp(gs))": lambda s, o, rcp: {
        "rcp(gs)": o.g,
        "s*rcp(gs)": (a := s * o.g),
        "rcp(s*rcp(gs))": rcp(a, "multiplier"),
    },
    "x*(gs/s)": lambda s, o, rcp: {"gs/s": o.gs / s},
    "x*bf16(gs/s)": lambda s, o, rcp: {
        "gs/s": (a := o.gs / s),
        "bf16(gs/s)": a.clamp(max=_BF16_MAX).bfloat16().float(),
    },
}


def _as_float32(outer: Tensor | None) -> Tensor:
    assert outer is not None
    return outer.float()


def _flush(t: Tensor, d: Dialect) -> Tensor:
    return torch.where(t.abs() < _FLT_TINY, torch.copysign(torch.zeros_like(t), t), t) if d.flush else t


def _both_directions(given: Tensor, rcp: Reciprocal, d: Dialect) -> _Outer:
    """The outer scale as multiplier and divisor: one is `given`, the other its reciprocal where a form reads it."""
    if d.encodes:
        g = _flush(rcp(given, "outer"), d)
        return _Outer(g=torch.where(given == 0, 1e-8, g) if d.underflow == "1e-8" else g, gs=given)
    reads_inverse = "gs" in d.scale or "gs" in d.multiplier
    return _Outer(g=given, gs=rcp(given, "outer") if reads_inverse else given)


def _magnitude(x: Tensor, d: Dialect) -> Tensor:
    magnitude = x.abs() if d.observer == "input" else x.float().abs()
    return magnitude.nan_to_num(nan=0.0, posinf=torch.inf) if d.nan_max == "ignore" else magnitude


def _amax(magnitude: Tensor, granularity: str) -> Tensor:
    return magnitude.amax() if granularity == "tensor" else magnitude.amax(dim=-1, keepdim=True)


def _outer_of(amax: Tensor, d: Dialect) -> Tensor:
    if d.outer_guard == "tiny":
        amax = amax.clamp(min=torch.finfo(amax.dtype).tiny)
    outer = _OUTER[d.outer](amax, _constant(formats.E2M1_MAX * d.outer_max, amax))
    if d.outer_guard == "flt_max":
        outer = torch.minimum(outer, torch.full_like(outer, _FLT_MAX))
        outer = torch.where((amax == 0) | (outer == 0), 1.0, outer)
    elif d.outer_guard == "tiny":
        outer = outer.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0)
    elif d.outer_guard == "one":
        outer = torch.where(amax > 0, outer, 1.0)
    return outer.float()


def _shared_max(maxima: Tensor, d: Dialect) -> Tensor:
    """Largest magnitude of all that share a block scale, for each 1x16 block."""
    if d.tile == "1x16":
        return maxima
    return maxima.unflatten(-2, (-1, BLOCK)).amax(dim=-2).repeat_interleave(BLOCK, dim=-2)


def _factors(d: Dialect) -> tuple[float, ...]:
    return (1.0,) if d.rule == "six" else (1.0, 1.5)


def _candidate(
    blocks: Tensor, v: Tensor, base: _Steps, factor: float, outer: _Outer, rcp: Reciprocal, d: Dialect
) -> _Candidate:
    """Scales and codes for a block scale of `factor` times the base."""
    steps = dict(base)
    wanted = list(base.values())[-1]
    if factor != 1.0:
        steps["1.5 * scale"] = wanted = wanted * factor
    scales = _encode_scale(wanted, v, d)
    s = formats.decode(scales, formats.E4M3)
    multiplier = {k: _flush(t, d) for k, t in _MULTIPLIER[d.multiplier](s, outer, rcp).items()}
    last = _guarded(list(multiplier.values())[-1], s, v, d)
    steps |= {"s": s, **multiplier}
    operand = last.unsqueeze(-1)
    y = _flush(blocks / operand if d.multiplier.startswith("x/") else blocks * operand, d)
    if d.underflow == "positive_zero":
        y = torch.where(s.unsqueeze(-1) != 0, y, 0.0)
    steps["y"] = y
    return _Candidate(steps, scales, _encode_codes(y, d), y)


def _encode_scale(wanted: Tensor, v: Tensor, d: Dialect) -> Tensor:
    if d.zero_scale == "zero":
        wanted = torch.where(v == 0, 0.0, wanted)
    if d.zero_scale == "one":
        wanted = torch.where(wanted == 0, 1.0, wanted)
    if d.scale_floor:
        wanted = wanted.clamp(min=d.scale_floor)
    scales = formats.encode(wanted, formats.E4M3)
    if d.zero_scale == "eighth":
        scales = torch.where(scales == 0, 0x20, scales)
    return scales


def _guarded(operand: Tensor, s: Tensor, v: Tensor, d: Dialect) -> Tensor:
    """The multiplier (or divisor) with the dialect's rule for a block scale that underflowed."""
    nothing = torch.inf if d.multiplier.startswith("x/") else 0.0
    if d.underflow == "zero_step":
        return torch.where(operand == 0, nothing, operand)
    if d.underflow == "zero_scale":
        return torch.where(s == 0, nothing, operand)
    if d.underflow == "zero_block":
        return torch.where(v == 0, nothing, operand)
    if d.underflow == "flt_max":
        return torch.minimum(operand, torch.full_like(operand, _FLT_MAX))
    if d.underflow == "1e-8":
        return torch.where(operand.isinf(), 1e-8, operand)
    return operand


def _encode_codes(y: Tensor, d: Dialect) -> Tensor:
    if d.pre_round == "bf16":
        y = y.bfloat16().float()
    codes = formats.encode(y, formats.E2M1)
    if d.overflow == "wrap":
        codes = torch.where(y.abs() >= _WRAPS, _wrapped(_to_even(y)), codes)
    if d.zero_sign == "dropped":
        codes = codes.masked_fill(y == 0, 0)
    if d.nan == "zero":
        codes = codes.masked_fill(y.isnan(), 0)
    return codes


def _to_even(y: Tensor) -> Tensor:
    """The E2M1 grid of its top binade (spacing 2), continued beyond 6."""
    half = y.abs().clamp(max=_FLT_MAX) * 0.5
    return torch.copysign(2.0 * half.round(), y)


def _wrapped(value: Tensor) -> Tensor:
    """Low nibble of sign, exponent and top mantissa bit, for a magnitude that needs a third exponent bit."""
    bits = value.view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) - 126
    return (((bits >> 28) & 8) | (((exponent << 1) | ((bits >> 22) & 1)) & 0xF)).to(torch.uint8)


def _better(candidates: list[_Candidate], blocks: Tensor, amax: Tensor | None, outer: _Outer, d: Dialect) -> _Candidate:
    """Four-over-six: of the candidates for 6 and for 4, the one of the smaller error; a tie is six's."""
    six, four = candidates
    errors = [_error(c, blocks, amax, outer, d) for c in (six, four)]
    pick = errors[1] < errors[0]
    steps = {f"{k} | six": t for k, t in six.steps.items()} | {f"{k} | four": t for k, t in four.steps.items()}
    steps |= {f"error {d.rule} | six": errors[0], f"error {d.rule} | four": errors[1]}
    return _Candidate(
        steps,
        torch.where(pick, four.scales, six.scales),
        torch.where(pick.unsqueeze(-1), four.codes, six.codes),
        torch.where(pick.unsqueeze(-1), four.y, six.y),
    )


def _error(c: _Candidate, blocks: Tensor, amax: Tensor | None, outer: _Outer, d: Dialect) -> Tensor:
    grid = formats.decode(formats.encode(c.y, formats.E2M1), formats.E2M1)
    if d.overflow == "wrap":
        grid = torch.where(c.y.abs() >= _WRAPS, _to_even(c.y), grid)
    value = grid * formats.decode(c.scales, formats.E4M3).unsqueeze(-1)
    if d.error == "q*s*g":
        value = value * outer.g.unsqueeze(-1)
    else:
        assert amax is not None
        value = value * amax.float().unsqueeze(-1) / _constant(formats.E2M1_MAX * d.outer_max, value)
    difference = (value - blocks).abs()
    if d.rule == "mse":
        difference = difference * difference
    if d.tile == "16x16":
        return _tile_reduce(difference, d)
    return _reduce(difference, d)


def _reduce(difference: Tensor, d: Dialect) -> Tensor:
    """Error of a block from its elements [..., n], as float32; the order of a sum is the dialect's."""
    if d.rule == "abs_max":
        return difference.amax(dim=-1)
    if d.error_sum == "torch":  # the library's own call: its order is this torch build's, and no promise
        return difference.sum(dim=-1)
    total = torch.zeros_like(difference[..., 0])
    for index in range(difference.shape[-1]):
        total = total + difference[..., index]
    return total


def _tile_reduce(difference: Tensor, d: Dialect) -> Tensor:
    """Error of a 16x16 tile for each of its rows; [..., N, K/16, 16] -> [..., N, K/16].

    Sequential sums run along each row, then rows are folded 8, 4, 2, 1, as Transformer Engine's warp does.
    """
    rows = difference.unflatten(-3, (-1, BLOCK))  # [..., N/16, 16, K/16, 16]
    if d.error_sum == "torch" or d.rule == "abs_max":
        tile = _reduce(rows.transpose(-3, -2).flatten(-2), d)
    else:
        tile = _reduce(rows, d)
        for half in (8, 4, 2, 1):
            tile = tile[..., :half, :] + tile[..., half : 2 * half, :]
        tile = tile.squeeze(-2)
    return tile.repeat_interleave(BLOCK, dim=-2)


def _check_tile(x: Tensor, outer: Tensor | None, d: Dialect) -> None:
    if d.tile == "16x16" and (x.ndim < 2 or x.shape[-2] % BLOCK):
        raise ValueError(f"tensor of shape {tuple(x.shape)}: 16x16 tiles need rows in a multiple of {BLOCK}")
    if outer is not None and d.error == "q*s*amax/max" and d.rule != "six":
        raise ValueError(f"dialect {d.name!r} weighs its error by amax: it cannot take an outer scale")
