"""Statistics of log-probability differences between variants, each with its interval over prompts.

A gap is |log p_reference - log p_variant| of the same next token given the same tokens before it. Its statistics are
GapMeter's; the interval (95 %, BCa bootstrap) is that of the mean over prompts of a prompt's mean, because tokens of
one prompt are not independent. k3 is the mean of exp(r) - r - 1 over the given tokens: a KL estimate only where the
tokens were sampled from one of the two sides (a recorded rollout), elsewhere a distance.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quads.gap import GapMeter, mean_interval

STATISTICS = ("mean", "p50", "p99", "max", "k3")


@dataclass(frozen=True)
class GapRow:
    """The gap between two variants; low and high bound the mean over prompts."""

    variant: str
    against: str
    mean: float
    low: float
    high: float
    p50: float
    p99: float
    max: float
    k3: float
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def gap_row(variant: str, against: str, ours: Tensor, theirs: Tensor, counted: Tensor) -> GapRow:
    """Gap of log-probabilities `ours` to `theirs` (float32 [B, T-1]) where `counted` (bool)."""
    meter = GapMeter()
    meter.update(theirs, ours, counted)
    summary = meter.summary()
    low, high = mean_interval(prompt_means((ours - theirs).abs(), counted))
    values = {name: summary[f"gap/{name}"] for name in STATISTICS}
    return GapRow(variant=variant, against=against, low=low, high=high, tokens=int(summary["gap/tokens"]), **values)


def prompt_means(values: Tensor, counted: Tensor) -> np.ndarray:
    """Mean of `values` [B, T-1] over the counted tokens of each prompt that has any, float64 [<= B]."""
    counts = counted.sum(-1)
    sums = torch.where(counted, values.double(), 0.0).sum(-1)
    return (sums[counts > 0] / counts[counts > 0]).numpy()


def paired_difference(a: Tensor, b: Tensor, reference: Tensor, counted: Tensor) -> tuple[float, float, float]:
    """gap(a) - gap(b) to the same reference: mean over prompts with its interval; it pairs prompt with prompt."""
    difference = prompt_means((a - reference).abs() - (b - reference).abs(), counted)
    return (float(difference.mean()), *mean_interval(difference))


def position_means(values: Tensor, counted: Tensor) -> list[float]:
    """Mean of `values` [B, T-1] over prompts at each position; NaN where none counts."""
    counts = counted.sum(0)
    sums = torch.where(counted, values.double(), 0.0).sum(0)
    return torch.where(counts > 0, sums / counts.clamp(min=1), torch.nan).tolist()


def term_shares(terms: dict[str, Tensor], counted: Tensor) -> dict[str, float]:
    """How much of the squared total each term makes: sum(term * total) / sum(total^2), total = the terms' sum.

    The shares sum to 1; one is negative where its term cancels others. Raises nothing on a zero total: all NaN.
    """
    chosen = {name: value[counted].double() for name, value in terms.items()}
    total = torch.stack(list(chosen.values())).sum(0)
    energy = float((total * total).sum())
    return {name: float((value * total).sum()) / energy if energy else float("nan") for name, value in chosen.items()}
