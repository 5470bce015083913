"""The arithmetic that dialects choose from: outer scale, block scale, multiplier, guards, E2M1 codes.

Each table maps a value of a `quads.emulation.dialects.Dialect` field to what it computes, its roundings by name.
All float32, one rounding an operation. `v` is the largest magnitude of a block [..., K/16], `s` the decoded scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quads.emulation import formats
from quads.emulation.dialects import BLOCK, Dialect
from quads.emulation.reciprocal import Reciprocal

WRAPS = 7.0  # from here on, rounding to the spacing of E2M1's top binade leaves the format

_FLT_MAX = torch.finfo(torch.float32).max
_FLT_TINY = torch.finfo(torch.float32).tiny
_BF16_MAX = torch.finfo(torch.bfloat16).max

Steps = dict[str, Tensor]  # rounded intermediates by name, in order; the last is the result


@dataclass(frozen=True)
class Outer:
    """The outer scale as multiplier g and as divisor gs, float32 [] or [..., 1]."""

    g: Tensor
    gs: Tensor


@dataclass(frozen=True)
class Candidate:
    """One way to quantise each block: steps, scale bytes [..., K/16], codes and unrounded y [..., K/16, 16]."""

    steps: Steps
    scales: Tensor
    codes: Tensor
    y: Tensor


def constant(value: float, like: Tensor) -> Tensor:
    """A tensor operand: torch divides by a Python number with a reciprocal on CUDA, and Python numbers by a tensor so
    everywhere; only tensor / tensor is a correctly rounded division."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _sixth(v: Tensor) -> Tensor:
    return (v / constant(6.0, v)).float()


def _rcp6(v: Tensor, rcp: Reciprocal) -> Tensor:
    return rcp(torch.full((), 6.0, device=v.device), "six")


_OUTER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "amax/max": lambda amax, most: amax / most,
    "max/amax": lambda amax, most: most / amax,
    "max*(1/amax)": lambda amax, most: most * (1.0 / amax),
    "one": lambda amax, most: torch.ones_like(amax),
}
# Each form names its roundings in order; the last is the result.
_SCALE: dict[str, Callable[[Tensor, Outer, Reciprocal], Steps]] = {
    "v/6/g": lambda v, o, rcp: {"v/6": (a := _sixth(v)), "(v/6)/g": a / o.g},
    "v/(6*g)": lambda v, o, rcp: {"6*g": (a := 6.0 * o.g), "v/(6*g)": v.float() / a},
    "v/6*gs": lambda v, o, rcp: {"v/6": (a := _sixth(v)), "(v/6)*gs": a * o.gs},
    "gs*(v*rcp6)": lambda v, o, rcp: {"v*rcp(6)": (a := v.float() * _rcp6(v, rcp)), "gs*(v*rcp(6))": o.gs * a},
    "v*(gs*rcp6)": lambda v, o, rcp: {"gs*rcp(6)": (a := o.gs * _rcp6(v, rcp)), "v*(gs*rcp(6))": v.float() * a},
}
_MULTIPLIER: dict[str, Callable[[Tensor, Outer, Reciprocal], Steps]] = {
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
_UNDERFLOW: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "zero_step": lambda operand, s, v, nothing: torch.where(operand == 0, nothing, operand),
    "zero_scale": lambda operand, s, v, nothing: torch.where(s == 0, nothing, operand),
    "positive_zero": lambda operand, s, v, nothing: torch.where(s == 0, nothing, operand),
    "zero_block": lambda operand, s, v, nothing: torch.where(v == 0, nothing, operand),
    "flt_max": lambda operand, s, v, nothing: torch.minimum(operand, torch.full_like(operand, _FLT_MAX)),
    "1e-8": lambda operand, s, v, nothing: torch.where(operand.isinf(), 1e-8, operand),
    "none": lambda operand, s, v, nothing: operand,
}


def flush(t: Tensor, d: Dialect) -> Tensor:
    """FP32 subnormals to zero where the dialect's compiler does so."""
    return torch.where(t.abs() < _FLT_TINY, torch.copysign(torch.zeros_like(t), t), t) if d.flush else t


def both_directions(given: Tensor, rcp: Reciprocal, d: Dialect) -> Outer:
    """The outer scale as multiplier and divisor: one is `given`, the other its reciprocal where a form reads it."""
    if d.encodes:
        g = flush(rcp(given, "outer"), d)
        return Outer(g=torch.where(given == 0, 1e-8, g) if d.underflow == "1e-8" else g, gs=given)
    reads_inverse = "gs" in d.scale or "gs" in d.multiplier
    return Outer(g=given, gs=rcp(given, "outer") if reads_inverse else given)


def magnitude_of(x: Tensor, d: Dialect) -> Tensor:
    """|x| as the dialect's maxima see it: its dtype, and whether NaN takes part."""
    magnitude = x.abs() if d.observer == "input" else x.float().abs()
    return magnitude.nan_to_num(nan=0.0, posinf=torch.inf) if d.nan_max == "ignore" else magnitude


def amax_of(magnitude: Tensor, granularity: str) -> Tensor:
    """Largest magnitude of the tensor [] or of each token [..., 1]."""
    return magnitude.amax() if granularity == "tensor" else magnitude.amax(dim=-1, keepdim=True)


def outer_of(amax: Tensor, d: Dialect) -> Tensor:
    """The outer scale in the dialect's own direction, from amax in the observer's dtype."""
    if d.outer_guard == "tiny":
        amax = amax.clamp(min=torch.finfo(amax.dtype).tiny)
    outer = _OUTER[d.outer](amax, constant(formats.E2M1_MAX * d.outer_max, amax))
    if d.outer_guard == "flt_max":
        outer = torch.minimum(outer, torch.full_like(outer, _FLT_MAX))
        outer = torch.where((amax == 0) | (outer == 0), 1.0, outer)
    elif d.outer_guard == "tiny":
        outer = outer.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0)
    elif d.outer_guard == "one":
        outer = torch.where(amax > 0, outer, 1.0)
    return outer.float()


def shared_max(maxima: Tensor, d: Dialect) -> Tensor:
    """Largest magnitude of all that share a block scale, for each 1x16 block."""
    if d.tile == "1x16":
        return maxima
    return maxima.unflatten(-2, (-1, BLOCK)).amax(dim=-2).repeat_interleave(BLOCK, dim=-2)


def block_scale(v: Tensor, outer: Outer, rcp: Reciprocal, d: Dialect) -> Steps:
    """The block scale before its cast to E4M3."""
    return {name: flush(t, d) for name, t in _SCALE[d.scale](v, outer, rcp).items()}


def factors(d: Dialect) -> tuple[float, ...]:
    """What block scales are tried, relative to absmax / 6: 1.5 maps the maximum to 4."""
    return (1.0,) if d.rule == "six" else (1.0, 1.5)


def candidate(
    blocks: Tensor, v: Tensor, base: Steps, factor: float, outer: Outer, rcp: Reciprocal, d: Dialect
) -> Candidate:
    """Scales and codes for a block scale of `factor` times the base."""
    steps = dict(base)
    wanted = list(base.values())[-1]
    if factor != 1.0:
        steps["1.5 * scale"] = wanted = wanted * factor
    scales = _encode_scale(wanted, v, outer, d)
    s = formats.decode(scales, formats.E4M3)
    multiplier = {k: flush(t, d) for k, t in _MULTIPLIER[d.multiplier](s, outer, rcp).items()}
    last = _guarded(list(multiplier.values())[-1], s, v, d)
    steps |= {"s": s, **multiplier}
    operand = last.unsqueeze(-1)
    y = flush(blocks / operand if d.multiplier.startswith("x/") else blocks * operand, d)
    if d.underflow == "positive_zero":
        y = torch.where(s.unsqueeze(-1) != 0, y, 0.0)
    steps["y"] = y
    return Candidate(steps, scales, _encode_codes(y, d), y)


def _encode_scale(wanted: Tensor, v: Tensor, outer: Outer, d: Dialect) -> Tensor:
    if d.zero_scale == "zero":  # under a NaN outer scale the block scale of zeros is NaN too
        wanted = torch.where((v == 0) & ~outer.gs.isnan(), 0.0, wanted)
    if d.zero_scale == "one":
        wanted = torch.where(wanted == 0, 1.0, wanted)
    if d.scale_floor:
        wanted = wanted.clamp(min=d.scale_floor)
    scales = formats.encode(wanted, formats.E4M3)
    if d.zero_scale == "eighth":
        scales = torch.where(scales == 0, 0x20, scales)
    return scales


def _guarded(operand: Tensor, s: Tensor, v: Tensor, d: Dialect) -> Tensor:
    """The multiplier (or divisor) under the dialect's rule for a block scale that underflowed."""
    nothing = torch.inf if d.multiplier.startswith("x/") else 0.0
    return _UNDERFLOW[d.underflow](operand, s, v, nothing)


def _encode_codes(y: Tensor, d: Dialect) -> Tensor:
    if d.pre_round == "bf16":
        y = y.bfloat16().float()
    codes = formats.encode(y, formats.E2M1)
    if d.overflow == "wrap":
        codes = torch.where(y.abs() >= WRAPS, _wrapped(to_even(y)), codes)
    if d.zero_sign == "dropped":
        codes = codes.masked_fill(y == 0, 0)
    if d.nan == "zero":
        codes = codes.masked_fill(y.isnan(), 0)
    return codes


def to_even(y: Tensor) -> Tensor:
    """The E2M1 grid of its top binade (spacing 2), continued beyond 6."""
    half = y.abs().clamp(max=_FLT_MAX) * 0.5
    return torch.copysign(2.0 * half.round(), y)


def _wrapped(value: Tensor) -> Tensor:
    """Low nibble of sign, exponent and top mantissa bit, for a magnitude that needs a third exponent bit."""
    bits = value.view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) - 126
    return (((bits >> 28) & 8) | (((exponent << 1) | ((bits >> 22) & 1)) & 0xF)).to(torch.uint8)
