"""Arithmetic that quantisers get wrong: rounding, maxima, scales, the outer scale. Names are those of faults.toml.

Each effect is a function from a question (a case as a dialect sees it) to the answer of a kernel with that fault.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quads.conformance.protocol import Quantized
from quads.conformance.reference import Question, Reference, correct
from quads.emulation import formats
from quads.emulation.dialects import BLOCK

_TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_GRID = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_NONE = torch.zeros(0, dtype=torch.uint8)
Codes = Callable[[Tensor], Tensor]
Scales = Callable[[Tensor], Tensor]


def _blocks(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, BLOCK))


def _signed(magnitude: Tensor, y: Tensor) -> Tensor:
    return (magnitude | (torch.signbit(y).int() << 3)).to(torch.uint8)


def _away(y: Tensor) -> Tensor:
    return _signed(torch.bucketize(y.abs(), _TIES, right=True), y)


def _toward(y: Tensor) -> Tensor:
    return _signed(torch.bucketize(y.abs(), _TIES, right=False), y)


def _truncated(y: Tensor) -> Tensor:
    return _signed(torch.bucketize(y.abs(), _GRID, right=True), y)


def _other_codes(encode: Codes, q: Question) -> Quantized:
    """The same scales, another rounding of y."""
    trace = q.trace()
    y = trace.steps.get("y")
    if y is None:  # four-over-six has two candidates; its own codes stay
        return correct(q)
    codes = torch.where(y.isnan(), _blocks(trace.result.codes), encode(y)).flatten(-2)
    return Quantized(codes, trace.result.scales, _NONE, trace.result.outer)


def scale_before_cast(q: Question) -> Tensor | None:
    """The block scale before its cast, by the dialect's own association (None: two candidates)."""
    steps = q.trace().steps
    names = list(steps)
    if "s" not in names:
        return None
    taken = [name for name in names[: names.index("s")] if name not in ("v", "g", "gs")]
    return steps[taken[-1]] if taken else None


def codes_for(q: Question, s: Tensor) -> Tensor:
    """Codes of x for the decoded block scales `s`, by the form of the dialect's multiplier."""
    g = q.trace().result.outer
    gs = 1.0 / g if q.outer is None or not q.dialect.encodes else q.outer
    x, form = _blocks(q.x.float()), q.dialect.multiplier
    if form.startswith("x/"):
        y = x / (s * g if form == "x/(s*g)" else s / gs).unsqueeze(-1)
    else:
        y = x * (1.0 / (s * g) if "rcp" in form else gs / s).unsqueeze(-1)
    y = torch.where((s == 0).unsqueeze(-1), torch.copysign(torch.zeros_like(x), x), y)
    return formats.encode(y, formats.E2M1).flatten(-2)


def _other_scales(encode: Scales, q: Question) -> Quantized:
    """Another cast of the block scale, and the codes that go with it."""
    wanted = scale_before_cast(q)
    if wanted is None:
        return correct(q)
    scales = encode(wanted).expand(*q.x.shape[:-1], -1)
    return Quantized(codes_for(q, formats.decode(scales, formats.E4M3)), scales, _NONE, q.trace().result.outer)


def _scale_toward_zero(wanted: Tensor) -> Tensor:
    return formats.encode(wanted, formats.E4M3, rounding="rz")


def _scale_up(wanted: Tensor) -> Tensor:
    return formats.encode(wanted, formats.E4M3, rounding="rp")


def _scale_unsaturated(wanted: Tensor) -> Tensor:
    return formats.encode(wanted, formats.E4M3, saturate=False)


def _scale_power_of_two(wanted: Tensor) -> Tensor:
    exponent = torch.frexp(wanted).exponent - (torch.frexp(wanted).mantissa == 0.5).int()
    return formats.encode(torch.where(wanted > 0, torch.exp2(exponent.float()), 0.0), formats.E4M3)


def _scale_e5m2(wanted: Tensor) -> Tensor:
    return formats.encode(wanted, formats.E5M2)


def _unrounded_scale(q: Question) -> Quantized:
    """Codes from the FP32 scale, before its cast to E4M3."""
    wanted, right = scale_before_cast(q), correct(q)
    return right if wanted is None else Quantized(codes_for(q, wanted), right.scales, _NONE, right.outer)


def _with_maxima(change: Callable[[Tensor], Tensor], q: Question) -> Quantized:
    """Block scales from other maxima: an element that carries the changed maximum is put into each block first."""
    blocks = _blocks(q.x)
    top = change(blocks)  # [..., K/16]
    outer = q.trace().steps["gs" if q.dialect.encodes else "g"]
    stand_in = torch.zeros_like(blocks)
    stand_in[..., 0] = top
    shadow = Question(stand_in.flatten(-2), outer, q.dialect, q.protocol)
    scales = shadow.trace().result.scales
    return Quantized(codes_for(q, formats.decode(scales, formats.E4M3)), scales, _NONE, q.trace().result.outer)


def _signed_max(blocks: Tensor) -> Tensor:
    return blocks.amax(-1).clamp(min=0)


def _max_of_32(blocks: Tensor) -> Tensor:
    top = blocks.abs().amax(-1)
    if top.shape[-1] % 2:
        top = torch.nn.functional.pad(top, (0, 1))
    return top.unflatten(-1, (-1, 2)).amax(-1).repeat_interleave(2, -1)[..., : blocks.shape[-2]]


def _outer_changed(change: Callable[[Tensor], Tensor], q: Question) -> Quantized:
    """Another outer scale, in the dialect's direction."""
    own = q.trace().steps["gs" if q.dialect.encodes else "g"]
    result = Question(q.x, change(own), q.dialect, q.protocol).trace().result
    return Quantized(result.codes, result.scales, _NONE, result.outer if q.outer is None else q.trace().result.outer)


def _input_as(dtype: torch.dtype, q: Question) -> Quantized:
    return correct(Question(q.x.to(dtype).to(q.x.dtype), q.outer, q.dialect, q.protocol))


EFFECTS: dict[str, Reference] = {
    "code-ties-away": partial(_other_codes, _away),
    "code-ties-toward": partial(_other_codes, _toward),
    "code-truncated": partial(_other_codes, _truncated),
    "scale-truncated": partial(_other_scales, _scale_toward_zero),
    "scale-rounded-up": partial(_other_scales, _scale_up),
    "scale-unsaturated": partial(_other_scales, _scale_unsaturated),
    "scale-power-of-two": partial(_other_scales, _scale_power_of_two),
    "scale-e5m2": partial(_other_scales, _scale_e5m2),
    "codes-from-unrounded-scale": _unrounded_scale,
    "signed-block-max": partial(_with_maxima, _signed_max),
    "block-of-32": partial(_with_maxima, _max_of_32),
    "outer-inverse": partial(_outer_changed, lambda g: 1.0 / g),
    "outer-missing": partial(_outer_changed, torch.ones_like),
    "outer-without-6": partial(_outer_changed, lambda g: g * 6),
    "outer-without-448": partial(_outer_changed, lambda g: g * 448),
    "input-as-float16": partial(_input_as, torch.float16),
    "input-as-bfloat16": partial(_input_as, torch.bfloat16),
}
