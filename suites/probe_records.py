"""From two scorings of the same tokens to one flat record.

gap = |log p_reference - log p_arm| of a token. kl = sum over the vocabulary of p_reference (log p_reference - log
p_arm), mean a token. k3 = mean of exp(-r) + r - 1 with r = log p_reference - log p_arm, the estimate of the same KL
from the tokens alone (they were sampled from the BF16 policy). router_flips: share of (token, router) pairs whose set
of experts differs, at the positions that predict the tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quads.attribution.batch import TokenBatch
from quads.gap import GapMeter
from quads.suites.probe_scoring import Scored

_KL_ELEMENTS = 1 << 24  # of the vocabulary-wide products held at once in float64
_NAMES = {
    "probe/gap_mean": "gap/mean",
    "probe/gap_p50": "gap/p50",
    "probe/gap_p99": "gap/p99",
    "probe/gap_max": "gap/max",
    "probe/k3": "gap/k3_reverse",
    "probe/tokens": "gap/tokens",
}


def compare(arm: Scored, reference: Scored, batch: TokenBatch) -> dict[str, Any]:
    """The `probe/` part of a record. ValueError where a log-probability is not finite."""
    meter = GapMeter()
    meter.update(reference.logps, arm.logps, torch.ones_like(arm.logps, dtype=torch.bool))
    summary = meter.summary()
    record: dict[str, Any] = {ours: summary[theirs] for ours, theirs in _NAMES.items()}
    divergence = kl(reference.full, arm.full).cpu().numpy()
    record["probe/kl"] = float(divergence.mean())
    if arm.experts is not None and reference.experts is not None:
        record["probe/router_flips"] = float((arm.experts != reference.experts).any(dim=-1).double().mean())
    lengths = batch.counted.sum(dim=1).cpu().numpy()
    record["probe/by_sequence"] = _means(np.abs(meter.ratios), lengths)
    record["probe/kl_by_sequence"] = _means(divergence, lengths)
    return record


def kl(reference: Tensor, arm: Tensor) -> Tensor:
    """KL(reference || arm) of each row of log-probabilities float32 [N, V]: float64 [N]."""
    rows = max(1, _KL_ELEMENTS // reference.shape[1])
    parts = []
    for p, q in zip(reference.split(rows), arm.split(rows), strict=True):
        p, q = p.double(), q.double()
        parts.append((p.exp() * (p - q)).sum(dim=-1))
    return torch.cat(parts)


def _means(values: np.ndarray, lengths: np.ndarray) -> list[float]:
    """Mean of each sequence's run of `values`, to six significant digits: a record holds hundreds of them."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return [float(f"{mean:.6g}") for mean in np.add.reduceat(values, starts) / lengths]
