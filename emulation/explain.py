"""Why a block has the codes that it has: every rounding of one block, and which dialects would decide otherwise.

For people who debug a kernel: put in the 16 numbers and the outer scale of the first byte that differs, and read off
the step at which the two computations part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quads.emulation import dialects, quantizers
from quads.emulation.dialects import Dialect
from quads.emulation.quantizers import BLOCK, NVFP4Tensor


@dataclass(frozen=True)
class Step:
    """One rounded intermediate: its FP32 value and bit pattern. `element` is the index in the block, None for all."""

    name: str
    value: float
    hex: str
    element: int | None = None


@dataclass(frozen=True)
class Disagreement:
    """A dialect that gives this block another scale byte, or other codes at some elements."""

    dialect: str
    scale: int
    codes: tuple[int, ...]
    scale_differs: bool
    elements: tuple[int, ...]  # indices whose codes differ


@dataclass(frozen=True)
class Explanation:
    """One block under one dialect; `codes_depend_on_rcp` lists elements whose code moves within 1 ulp of rcp."""

    dialect: str
    source: str
    values: tuple[float, ...]
    steps: tuple[Step, ...]
    scale: int
    codes: tuple[int, ...]
    dequantized: tuple[float, ...]
    scale_depends_on_rcp: bool
    codes_depend_on_rcp: tuple[int, ...]
    disagreements: tuple[Disagreement, ...]


def explain_value(
    value: float,
    dialect: str | Dialect = "exact",
    *,
    amax: float | None = None,
    block_max: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Explanation:
    """`explain_block` of `value` at element 0; `block_max` (default: |value|) is element 1 where it is larger.

    `amax` is the tensor's largest magnitude (default: the block's).
    """
    if block_max is not None and block_max < abs(value):
        raise ValueError(f"block maximum {block_max} is below |value| = {abs(value)}")
    others = [block_max] if block_max is not None and block_max > abs(value) else []
    return explain_block([value, *others], dialect, amax=amax, dtype=dtype)


def explain_block(
    values: Sequence[float] | Tensor,
    dialect: str | Dialect = "exact",
    outer: float | None = None,
    *,
    amax: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Explanation:
    """Quantise one block of up to 16 `values` (zeros are appended), rounded to `dtype` first, step by step.

    The outer scale is `outer` (a multiplier; dialects that keep a divisor take fl(1 / outer)), or each dialect's own
    for a tensor of largest magnitude `amax` (default: the block's). Other dialects are compared on the same block.
    """
    d = dialects.load(dialect)
    block = _block(values, dtype)
    if outer is not None and amax is not None:
        raise ValueError("outer and amax both given: the outer scale follows from either")
    x = _in_its_tensor(block, amax)
    taken = quantizers.trace(x, _outer(outer, d), dialect=d)
    decided = quantizers.decided(x, _outer(outer, d), dialect=d)
    codes = tuple(taken.result.codes[0, :BLOCK].tolist())
    scale = int(taken.result.scales[0, 0])
    count = len(values)
    return Explanation(
        dialect=d.name,
        source=d.source,
        values=tuple(block[0, :count].tolist()),
        steps=tuple(_steps(taken.steps, count)),
        scale=scale,
        codes=codes[:count],
        dequantized=tuple(_dequantized(taken.result)[:count]),
        scale_depends_on_rcp=not bool(decided.scales[0, 0]),
        codes_depend_on_rcp=tuple(i for i in range(count) if not bool(decided.codes[0, i])),
        disagreements=tuple(_disagreements(x, outer, d, scale, codes[:count])),
    )


def render(explanation: Explanation) -> str:
    """Plain text: one rounding a line, then codes, what depends on rcp, and the dialects that disagree."""
    e = explanation
    lines = [f"dialect {e.dialect} ({e.source})"]
    width = max(len(step.name) for step in e.steps) + 5
    for step in e.steps:
        name = step.name if step.element is None else f"{step.name} [{step.element}]"
        lines.append(f"  {name:<{width}} {step.value:<24.9g} {step.hex}")
    lines.append(f"  scale byte {e.scale:#04x}{' (depends on rcp)' if e.scale_depends_on_rcp else ''}")
    for index, (value, code, back) in enumerate(zip(e.values, e.codes, e.dequantized, strict=True)):
        note = "   depends on rcp" if index in e.codes_depend_on_rcp else ""
        lines.append(f"  [{index}] {value:.9g} -> code {code:X} -> {back:.9g}{note}")
    if not e.disagreements:
        lines.append("every named dialect gives this scale byte and these codes")
    for other in e.disagreements:
        lines.append(f"{other.dialect} differs: {_difference(other)}")
    return "\n".join(lines)


def _difference(other: Disagreement) -> str:
    parts = [f"scale byte {other.scale:#04x}"] if other.scale_differs else []
    if other.elements:
        parts.append("codes " + ", ".join(f"[{i}] {other.codes[i]:X}" for i in other.elements))
    return "; ".join(parts)


def _block(values: Sequence[float] | Tensor, dtype: torch.dtype) -> Tensor:
    block = torch.as_tensor(values, dtype=torch.float64).flatten()
    if not 1 <= block.numel() <= BLOCK:
        raise ValueError(f"block of {block.numel()} values: needs 1 to {BLOCK}")
    return torch.nn.functional.pad(block, (0, BLOCK - block.numel())).to(dtype).unsqueeze(0)


def _in_its_tensor(block: Tensor, amax: float | None) -> Tensor:
    """[1, 32] with the block first and amax in a second block; [1, 16] without amax."""
    if amax is None:
        return block
    if not amax >= float(block.abs().amax()):
        raise ValueError(f"amax {amax} is below the block's largest magnitude {float(block.abs().amax())}")
    rest = torch.zeros_like(block)
    rest[0, 0] = amax
    return torch.cat([block, rest], dim=-1)


def _outer(outer: float | None, d: Dialect) -> Tensor | None:
    if outer is None:
        return None
    multiplier = torch.tensor(outer, dtype=torch.float32)
    return 1.0 / multiplier if d.encodes else multiplier


def _steps(steps: dict[str, Tensor], count: int) -> list[Step]:
    rows = []
    for name, tensor in steps.items():
        per_element = tensor.ndim == 3
        values = tensor[0, 0, :count] if per_element else tensor.reshape(-1)[:1]
        for index, value in enumerate(values):
            bits = int(value.view(torch.int32)) & 0xFFFFFFFF
            rows.append(Step(name, float(value), f"{bits:08X}", index if per_element else None))
    return rows


def _dequantized(q: NVFP4Tensor) -> list[float]:
    return [float(v) for v in quantizers.dequantize(q)[0, :BLOCK]]


def _disagreements(
    x: Tensor, outer: float | None, chosen: Dialect, scale: int, codes: tuple[int, ...]
) -> list[Disagreement]:
    found = []
    for name, d in dialects.named().items():
        if not _comparable(d, outer) or name == chosen.name or (d.nonfinite == "refuse" and not x.isfinite().all()):
            continue
        other = quantizers.quantize(x, _outer(outer, d), dialect=d)
        other_scale, other_codes = int(other.scales[0, 0]), tuple(other.codes[0, : len(codes)].tolist())
        elements = tuple(i for i, (a, b) in enumerate(zip(codes, other_codes, strict=True)) if a != b)
        if other_scale != scale or elements:
            found.append(Disagreement(name, other_scale, other_codes, other_scale != scale, elements))
    return found


def _comparable(d: Dialect, outer: float | None) -> bool:
    """A block alone can be put to every dialect that needs no more rows and whose outer scale can be given."""
    takes_outer = d.rule == "six" or d.error == "q*s*g"
    return d.tile == "1x16" and (outer is None or takes_outer)
