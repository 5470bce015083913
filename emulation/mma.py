"""Tensor-core arithmetic: one fused step and chains of steps of the truncated fused dot-product-add family.

One step adds K products (or groups of products) and C. Every term is truncated toward zero to a multiple of
2^(e_max - F), e_max being the largest exponent of the terms, the truncated terms are added exactly, and the sum is
rounded once. Products are never normalised: a product has the exponent e_a + e_b; a group of 16 FP4 products is
summed exactly first and has the exponent of its scales, e_alpha + e_beta.

Edge cases. NaN anywhere (also a NaN scale on zero codes) gives the canonical NaN 0x7FFFFFFF (FP16: 0x7FFF); Inf as
in IEEE arithmetic; overflow gives Inf; FP32 subnormals are kept in C and D; -0 becomes +0; the sign of a UE4M3 scale
is ignored. Which chip does what is in mma_models.toml; what is known of each rule, and how, in evidence.toml.
Sources: mmasim 2.1.1 and arXiv 2511.10909 (T-FDPA, ST-FDPA, GST-FDPA).
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, Literal

import torch
from torch import Tensor

from quads.emulation import fdpa

_MAX_TERMS = 1 << 20  # terms held at a time


@dataclass(frozen=True, kw_only=True)
class Model:
    """One row of mma_models.toml, and the two rules that random words cannot decide.

    dead_group: whether a term whose products are all zero (or whose scales are) stays out of e_max.
    cancelled_group: whether a group whose non-zero products sum to zero stays in e_max.
    """

    name: str
    instruction: str
    chips: tuple[str, ...]
    operands: tuple[str, ...]
    k: int
    fraction_bits: int
    zero_exponent: int
    output: str
    group: int = 1
    scale: str = "none"
    scale_block: int = 0
    dead_group: Literal["excluded", "included"] = "excluded"
    cancelled_group: Literal["included", "excluded"] = "included"

    def replace(self, **changes: object) -> Model:
        """A copy with `changes`: the variants that tests and `undecided` compare with."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def models() -> dict[str, Model]:
    """Every row of the table, by name."""
    table = tomllib.loads(resources.files("quads.emulation").joinpath("mma_models.toml").read_text("utf-8"))
    return {name: _row(name, row) for name, row in table.items()}


def _row(name: str, fields: dict[str, Any]) -> Model:
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
    return Model(name=name, **values)


def model(name: str) -> Model:
    """The row `name`; ValueError that lists the names otherwise."""
    if name not in models():
        raise ValueError(f"no tensor-core model named '{name}' (known: {', '.join(models())})")
    return models()[name]


@dataclass(frozen=True)
class Operand:
    """Codes [..., rows, K] (integers; bit patterns of `format`) and block scale bytes [..., rows, K/block] or None."""

    codes: Tensor
    scales: Tensor | None = None
    format: str = "e2m1"

    def chunk(self, start: int, stop: int, block: int) -> Operand:
        """The K range [start, stop)."""
        scales = None if self.scales is None else self.scales[..., start // block : -(-stop // block)]
        return Operand(self.codes[..., start:stop], scales, self.format)

    def rows(self, index: Tensor | slice) -> Operand:
        """The rows `index` (dimension -2)."""
        scales = None if self.scales is None else self.scales[..., index, :]
        return Operand(self.codes[..., index, :], scales, self.format)

    def pairs(self, index: Tensor) -> Operand:
        """Rows `index` [P] of a two-dimensional operand as P operands of one row, for elementwise pairs."""
        rows = self.rows(index)
        return Operand(rows.codes.unsqueeze(1), None if rows.scales is None else rows.scales.unsqueeze(1), self.format)


def floating(x: Tensor) -> Operand:
    """The bit patterns of a bfloat16, float16, float32 (read as tf32), float8_e4m3fn or float8_e5m2 tensor."""
    kinds = {
        torch.bfloat16: (torch.int16, "bf16"),
        torch.float16: (torch.int16, "fp16"),
        torch.float32: (torch.int32, "tf32"),
        torch.float8_e4m3fn: (torch.uint8, "e4m3"),
        torch.float8_e5m2: (torch.uint8, "e5m2"),
    }
    if x.dtype not in kinds:
        raise ValueError(f"operand of dtype {x.dtype}: expected one of {', '.join(map(str, kinds))}")
    integer, name = kinds[x.dtype]
    return Operand(x.contiguous().view(integer), None, name)


def check_operands(a: Operand, b: Operand, model: Model) -> None:
    """Raise ValueError, naming the operand and the rule, where `model` defines no product of `a` and `b`."""
    for name, operand in (("a", a), ("b", b)):
        shape = tuple(operand.codes.shape)
        if operand.format not in model.operands:
            raise ValueError(f"{name} is {operand.format}: {model.name} takes {', '.join(model.operands)}")
        if operand.codes.dtype.is_floating_point or operand.codes.dtype == torch.bool:
            raise ValueError(f"{name} codes have dtype {operand.codes.dtype}: pass integer bit patterns")
        if operand.codes.ndim < 2 or operand.codes.numel() == 0:
            raise ValueError(f"{name} codes of shape {shape}: expected non-empty [..., rows, K]")
        if (operand.scales is None) != (model.scale == "none"):
            raise ValueError(f"{name} scales: {model.name} takes {model.scale} block scales")
        if shape[-1] % max(model.group, model.scale_block):
            raise ValueError(
                f"{name} codes of shape {shape}: K is not a multiple of {max(model.group, model.scale_block)}"
            )
        if operand.scales is not None and tuple(operand.scales.shape) != (*shape[:-1], shape[-1] // model.scale_block):
            raise ValueError(
                f"{name} scales of shape {tuple(operand.scales.shape)} do not match codes of shape {shape}: "
                f"one scale per {model.scale_block} K elements"
            )
    if a.codes.shape[-1] != b.codes.shape[-1]:
        raise ValueError(f"K differs: a has {a.codes.shape[-1]}, b has {b.codes.shape[-1]}")


def step(a: Operand, b: Operand, c: Tensor, model: Model) -> Tensor:
    """One fused step: bits of round(C + A B^T), K <= model.k.

    a [..., M, K], b [..., N, K], c [..., M, N] (int32 FP32 bits, or int16 FP16 bits). Returns bits like `c`.
    """
    rule = fdpa.OUTPUTS[model.output]
    return fdpa.to_bits(_accumulate(*_terms(a, b, model), c.view(rule.dtype), model), rule)


def chain(a: Operand, b: Operand, model: Model, c: Tensor | None = None) -> Tensor:
    """Bits [..., M, N] of a whole K: fused steps of model.k in ascending order, starting from `c` (zeros if None)."""
    check_operands(a, b, model)
    rule, rows = fdpa.OUTPUTS[model.output], a.codes.shape[-2]
    if c is None:
        batch = torch.broadcast_shapes(a.codes.shape[:-2], b.codes.shape[:-2])
        c = torch.zeros(*batch, rows, b.codes.shape[-2], dtype=rule.integer, device=a.codes.device)
    row_terms = c.numel() // rows * a.codes.shape[-1] // model.group
    stride, terms = max(1, _MAX_TERMS // row_terms), model.k // model.group
    parts = []
    for first in range(0, rows, stride):
        d = c[..., first : first + stride, :].view(rule.dtype)
        values, exponents = _terms(a.rows(slice(first, first + stride)), b, model)
        for start in range(0, len(values), terms):
            d = _accumulate(values[start : start + terms], exponents[start : start + terms], d, model)
        parts.append(d)
    return fdpa.to_bits(torch.cat(parts, dim=-2), rule)


def hopper_mma_fp8(a: Operand, b: Operand, c: Tensor) -> Tensor:
    """Bits of mma.sync m16n8k32 FP8 with FP32 accumulator on sm_90, which has no such instruction.

    The compiler (nvcc 13.0) widens the operands to FP16 and issues two m16n8k16 steps from a zero accumulator, the
    first with the K elements 0, 1 of every four, the second with 2, 3; C is added last by an FP32 addition (RNE).
    Source: the SASS of tests/hardware/hopper_words.cu. K must be 32.
    """
    if a.codes.shape[-1] != 32 or b.codes.shape[-1] != 32:
        raise ValueError(f"a, b of K = {a.codes.shape[-1]}, {b.codes.shape[-1]}: mma.sync m16n8k32 takes K = 32")
    order = torch.arange(32, device=c.device).view(8, 2, 2).transpose(0, 1).flatten()
    total = chain(_as_fp16(a, order), _as_fp16(b, order), model("hopper_mma_f16"))
    return fdpa.to_bits(c.view(torch.float32) + total.view(torch.float32), fdpa.OUTPUTS["rz_fp32"])


def _as_fp16(operand: Operand, order: Tensor) -> Operand:
    significand, exponent = fdpa.split(operand.codes[..., order], operand.format)
    return floating((significand.double() * fdpa.power_of_two(exponent)).half())


def _accumulate(values: Tensor, exponents: Tensor, c: Tensor, model: Model) -> Tensor:
    rule = fdpa.OUTPUTS[model.output]
    return fdpa.fused_sum(values, exponents, c, rule, model.fraction_bits, model.zero_exponent)


def _terms(a: Operand, b: Operand, model: Model) -> tuple[Tensor, Tensor]:
    """Terms of A B^T [K / group, ..., M, N]: exact values (float64) and the exponents they are aligned by (int32)."""
    if model.group > 1:
        return _grouped_terms(a, b, model)
    products, exponents = _outer(*fdpa.split(a.codes, a.format), *fdpa.split(b.codes, b.format))
    if a.scales is not None and b.scales is not None:
        scales, shifts = _outer(*fdpa.split(a.scales, model.scale), *fdpa.split(b.scales, model.scale))
        products = products * scales.repeat_interleave(model.scale_block, 0)[: len(products)]
        exponents = exponents + shifts.repeat_interleave(model.scale_block, 0)[: len(products)]
    values = products.double() * fdpa.power_of_two(exponents)
    if model.dead_group == "excluded":
        exponents = torch.where(products == 0, model.zero_exponent, exponents)
    return values, exponents


def _grouped_terms(a: Operand, b: Operand, model: Model) -> tuple[Tensor, Tensor]:
    assert a.scales is not None and b.scales is not None
    value_a, value_b = (_group_values(operand, model.group) for operand in (a, b))
    sums = value_a @ value_b.mT  # exact in float32: multiples of 1/4 up to 576
    scales, exponents = _outer(*fdpa.split(a.scales, model.scale), *fdpa.split(b.scales, model.scale))
    repeat = model.scale_block // model.group
    scales, exponents = scales.repeat_interleave(repeat, 0), exponents.repeat_interleave(repeat, 0)
    values = (sums * scales).double() * fdpa.power_of_two(exponents)
    live = (value_a != 0).float() @ (value_b != 0).float().mT > 0
    if model.dead_group == "excluded":
        exponents = torch.where(live & (scales != 0), exponents, model.zero_exponent)
    if model.cancelled_group == "excluded":
        exponents = torch.where(live & (sums == 0), model.zero_exponent, exponents)
    return values, exponents


def _group_values(operand: Operand, group: int) -> Tensor:
    """FP4 values as float32, [groups, ..., rows, group]."""
    significand, exponent = fdpa.split(operand.codes, operand.format)
    values = significand * fdpa.power_of_two(exponent).float()
    return values.unflatten(-1, (-1, group)).movedim(-2, 0)


def _outer(sa: Tensor, ea: Tensor, sb: Tensor, eb: Tensor) -> tuple[Tensor, Tensor]:
    """Products and exponent sums of [..., M, T] with [..., N, T]: [T, ..., M, N]."""
    sa, ea, sb, eb = (x.movedim(-1, 0) for x in (sa, ea, sb, eb))
    return sa.unsqueeze(-1) * sb.unsqueeze(-2), ea.unsqueeze(-1) + eb.unsqueeze(-2)
