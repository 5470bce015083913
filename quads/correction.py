"""Truncated importance sampling (TIS): weight the trainer's loss for tokens that another policy sampled.

w = min(exp(log pi_trainer - log pi_rollout), cap), detached. Source: truncated importance sampling for rollout-trainer
mismatch (F. Yao et al., 2025), cap 2 by default as in verl and TRL. Run comparisons without it first: it hides a bad
quantiser.
"""

from __future__ import annotations

from torch import Tensor


def tis_weights(trainer_logps: Tensor, rollout_logps: Tensor, mask: Tensor, *, cap: float = 2.0) -> Tensor:
    """Per-token weights (float32, the shape of the inputs), 1 outside `mask`. ValueError on a cap not above 0."""
    if not cap > 0:
        raise ValueError(f"cap = {cap} must be above 0")
    ratio = (trainer_logps.detach().float() - rollout_logps.detach().float()).exp().clamp(max=cap)
    return ratio.where(mask.bool(), 1.0)
