"""What a dialect gives for a case under a protocol, and how a kernel's answer differs from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quads.conformance.cases import QuantCase
from quads.conformance.protocol import Protocol, Quantized
from quads.emulation import dialects, quantizers
from quads.emulation.dialects import Dialect
from quads.emulation.quantizers import Trace

OUTER_MAX = 2688.0
KEPT = 1 << 15  # elements of a case whose traces are kept


@dataclass(frozen=True)
class Observation:
    """One case, the outer scale that the kernel was given (None: its own) and what it answered."""

    case: QuantCase
    given: Tensor | None
    answer: Quantized


@dataclass(frozen=True)
class Question:
    """A case as a dialect sees it: `outer` in the dialect's own direction, or None."""

    x: Tensor
    outer: Tensor | None
    dialect: Dialect
    protocol: Protocol
    answered: Quantized | None = None  # stands for the correct answer where faults are combined

    def trace(self) -> Trace:
        return self._trace

    @cached_property
    def _trace(self) -> Trace:
        return quantizers.trace(self.x, self.outer, granularity=self.granularity, dialect=self.dialect)

    @property
    def granularity(self) -> quantizers.Granularity | None:
        return "token" if self.protocol.granularity == "token" and self.dialect.tile == "1x16" else None


Reference = Callable[[Question], Quantized]


def given_outer(case: QuantCase, protocol: Protocol) -> Tensor | None:
    """The outer scale that the kernel is handed: g = fl(amax/2688), or fl(2688/amax); 1 where amax is 0."""
    if protocol.outer == "own":
        return None
    magnitude = case.x.float().abs().nan_to_num(nan=0.0, posinf=0.0)
    amax = magnitude.amax(-1, keepdim=True) if protocol.granularity == "token" else magnitude.amax()
    if case.amax is not None:
        amax = torch.full_like(amax, case.amax)
    most = torch.full((), OUTER_MAX)
    outer = amax / most if protocol.outer == "multiplier" else most / amax
    return torch.where(amax > 0, outer, 1.0)


def question(observed: Observation, dialect: Dialect, protocol: Protocol) -> Question:
    """The case as `dialect` sees it; a scale of the other direction is inverted, rounded once.

    A small case keeps its questions, and they their traces: the given scale follows from case and protocol.
    """
    asked = observed.case.asked
    if (dialect, protocol) in asked:
        return asked[dialect, protocol]
    outer = observed.given
    if outer is not None and dialect.encodes != (protocol.outer == "divisor"):
        outer = 1.0 / outer
    made = Question(observed.case.x, outer, dialect, protocol)
    if observed.case.x.numel() <= KEPT:
        asked[dialect, protocol] = made
    return made


def correct(q: Question) -> Quantized:
    """The dialect's own answer (or, under a second fault, that of a kernel with the first)."""
    if q.answered is not None:
        return q.answered
    result = q.trace().result
    return Quantized(result.codes, result.scales, torch.zeros(0, dtype=torch.uint8), result.outer)


def applies(case: QuantCase, dialect: Dialect, protocol: Protocol) -> bool:
    """Whether the dialect defines an answer to this case."""
    if dialect.nonfinite == "refuse" and not case.finite:
        return False
    if dialect.tile == "16x16" and case.x.shape[0] % dialects.BLOCK:
        return False
    return not (protocol.outer != "own" and dialect.rule != "six" and dialect.error == "q*s*amax/max")


@dataclass(frozen=True)
class Difference:
    """Where an answer differs: masks of codes [M, K] and scale bytes [M, K/16], padding bytes, and outer scales."""

    codes: Tensor
    scales: Tensor
    padding: int = 0
    outer: int = 0

    @property
    def total(self) -> int:
        return int(self.codes.sum()) + int(self.scales.sum()) + self.padding + self.outer


def difference(answer: Quantized, expected: Quantized, q: Question) -> Difference:
    """Compare byte for byte. The sign of a NaN scale, and codes that the dialect leaves undefined, do not count."""
    codes = (answer.codes != expected.codes) & ~_undefined(q)
    scales = _unsigned_nan(answer.scales) != _unsigned_nan(expected.scales)
    padding = int((_padding(expected, answer) != answer.padding).sum())
    return Difference(codes, scales, padding, _outer_differs(answer, expected))


def _padding(expected: Quantized, answer: Quantized) -> Tensor:
    return expected.padding if expected.padding.numel() else torch.zeros_like(answer.padding)


def _outer_differs(answer: Quantized, expected: Quantized) -> int:
    """A third result is the multiplier or the divisor; either direction of the expected scale is right."""
    if answer.outer is None or expected.outer is None:
        return 0
    if answer.outer.numel() not in (1, expected.outer.numel()):
        return 1
    got, want = torch.broadcast_tensors(answer.outer, expected.outer)
    same = (got == want) | (got == 1.0 / want) | (1.0 / got == want) | (got.isnan() & want.isnan())
    return int((~same).sum())


def _undefined(q: Question) -> Tensor:
    if q.dialect.nan != "undefined":
        return torch.zeros_like(q.x, dtype=torch.bool)
    steps = q.trace().steps
    y = next(t for name, t in steps.items() if name.split(" | ")[0] == "y")
    return ~y.flatten(-2).isfinite()


def _unsigned_nan(scales: Tensor) -> Tensor:
    return torch.where((scales & 0x7F) == 0x7F, 0x7F, scales)
