"""Which kind of difference each differing byte of a quantiser is: the words that reports use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from quads.conformance.cases import TIES
from quads.conformance.reference import Difference, Observation, Question, correct
from quads.emulation import quantizers
from quads.emulation.dialects import BLOCK

_LARGEST, _NAN = 0x7E, 0x7F
_AT_TIE = 2.0**-18  # relative distance from a tie within which association and reciprocal decide


def classify(asked: Iterable[tuple[Observation, Question, Difference]]) -> dict[str, int]:
    """Counts of differing scales and codes by kind, the most frequent first."""
    counts: Counter[str] = Counter()
    for observation, q, d in asked:
        if d.total:
            counts.update(_scale_kinds(observation, q, d))
            counts.update(_code_kinds(observation, q, d))
            counts.update({"stale padding": d.padding, "outer scale": d.outer})
    return {kind: count for kind, count in counts.most_common() if count}


def _scale_kinds(observation: Observation, q: Question, d: Difference) -> Counter[str]:
    want, got = correct(q).scales.int(), observation.answer.scales.int()
    v = q.trace().steps["v"].expand_as(want)
    rules = {
        "zero block": v == 0,
        "underflow": (want == 0) | (got == 0),
        "saturation": (want == _LARGEST) | (got >= _LARGEST),
        "scale rounding": (want - got).abs() == 1,
    }
    return _first_match(d.scales, rules, "scale")


def _code_kinds(observation: Observation, q: Question, d: Difference) -> Counter[str]:
    want, got = correct(q).codes, observation.answer.codes
    magnitude = q.trace().steps.get("y")
    y = torch.full(want.shape, torch.inf) if magnitude is None else magnitude.flatten(-2).abs()
    swapped = got.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) == want
    near = (y.unsqueeze(-1) / torch.tensor(TIES) - 1).abs().amin(-1)
    rules = {
        "following another scale": d.scales.repeat_interleave(BLOCK, dim=-1),
        "-0": (want & 7 == 0) & (got & 7 == 0),
        "nan": y.isnan() | ~q.x.isfinite(),
        "sign": (want & 7) == (got & 7),
        "tie": near < _AT_TIE,
        "nibble order": swapped & swapped.unflatten(-1, (-1, 2)).all(-1).repeat_interleave(2, -1),
        "underflow": (want & 7 == 0) & (y == 0),
        "saturation": y > 6.0,
        "rounding": ((want & 7).int() - (got & 7).int()).abs() == 1,
    }
    return _first_match(d.codes, rules, "code")


def _first_match(differs: Tensor, rules: dict[str, Tensor], otherwise: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    left = differs.clone()
    for kind, rule in rules.items():
        counts[kind] += int((left & rule).sum())
        left &= ~rule
    counts[otherwise] += int(left.sum())
    return counts


def depends_on_rcp(q: Question, d: Difference) -> bool:
    """Whether every difference is at a byte that reciprocals within 1 ulp leave open."""
    if q.dialect.reciprocal == "exact" or d.padding or d.outer:
        return False
    known = quantizers.decided(q.x, q.outer, dialect=q.dialect)
    open_blocks = (~known.scales).repeat_interleave(BLOCK, dim=-1)
    return not bool((d.scales & known.scales).any()) and not bool((d.codes & known.codes & ~open_blocks).any())
