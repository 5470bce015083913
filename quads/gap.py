"""Mismatch between trainer and rollout log-probabilities of the same tokens.

r = log pi_trainer - log pi_rollout, one value a sampled token. The tokens were sampled by the rollout, so
k3 = mean(exp(r) - r - 1) estimates KL(rollout || trainer) and k3_reverse = mean(exp(-r) + r - 1) the other direction
(Schulman, "Approximating KL divergence", 2020). ESS = (sum w)^2 / (n sum w^2) with w = exp(r), in (0, 1].
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import bootstrap
from torch import Tensor

from quads.errors import NonFiniteError

QUANTILES = (0.01, 0.5, 0.99)


class GapMeter:
    """Collects masked log-probability pairs; every statistic is exact over all tokens seen, padding never counts."""

    def __init__(self) -> None:
        self._trainer: list[np.ndarray] = []
        self._rollout: list[np.ndarray] = []
        self._flips = 0
        self._routed = 0

    def update(self, trainer_logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> None:
        """Add log-probabilities [...] (any float dtype) where `mask` (bool or 0/1, same shape) is set.

        Raises ValueError on different shapes and on a NaN or positive-infinite value under the mask.
        """
        if not trainer_logps.shape == rollout_logps.shape == mask.shape:
            shapes = [tuple(t.shape) for t in (trainer_logps, rollout_logps, mask)]
            raise ValueError(f"trainer, rollout and mask have shapes {shapes}: they must be equal")
        keep = mask.detach().bool().cpu()
        pair = [t.detach().cpu()[keep].double().numpy() for t in (trainer_logps, rollout_logps)]
        for name, values in zip(("trainer", "rollout"), pair, strict=True):
            if not np.isfinite(values).all():
                raise NonFiniteError(f"{name} log-probabilities hold {(~np.isfinite(values)).sum()} non-finite values")
        self._trainer.append(pair[0])
        self._rollout.append(pair[1])

    def update_routing(self, trainer_experts: Tensor, rollout_experts: Tensor, mask: Tensor) -> None:
        """Count router flips: tokens (mask [...]) whose set of top-k experts ([..., k], any order) differs."""
        a, b = (t.detach().cpu().sort(dim=-1).values for t in (trainer_experts, rollout_experts))
        keep = mask.detach().bool().cpu()
        self._flips += int(((a != b).any(dim=-1) & keep).sum())
        self._routed += int(keep.sum())

    @property
    def ratios(self) -> np.ndarray:
        """r = log pi_trainer - log pi_rollout of every token seen, float64."""
        return np.concatenate(self._trainer) - np.concatenate(self._rollout) if self._trainer else np.empty(0)

    def summary(self) -> dict[str, float]:
        """All statistics under this project's names (prefix `gap/`); an empty meter gives only the token count."""
        r = self.ratios
        result: dict[str, float] = {"gap/tokens": r.size}
        if r.size == 0:
            return result
        delta, weight = np.abs(r), np.exp(r)
        result |= {
            "gap/mean": float(delta.mean()),
            "gap/p50": float(np.quantile(delta, 0.5)),
            "gap/p99": float(np.quantile(delta, 0.99)),
            "gap/max": float(delta.max()),
            "gap/k3": float(np.mean(np.expm1(r) - r)),
            "gap/k3_reverse": float(np.mean(np.expm1(-r) + r)),
            "gap/ess": float(weight.sum() ** 2 / (r.size * (weight**2).sum())),
        }
        result |= {f"gap/ratio_q{round(100 * q):02d}": float(np.quantile(weight, q)) for q in QUANTILES}
        if self._routed:
            result["gap/router_flips"] = self._flips / self._routed
        return result

    def aliases(self) -> dict[str, float]:
        """The same numbers under the names that users of NeMo-RL, verl, slime and TRL know, where they agree."""
        trainer = np.concatenate(self._trainer) if self._trainer else np.empty(0)
        rollout = np.concatenate(self._rollout) if self._rollout else np.empty(0)
        if trainer.size == 0:
            return {}
        own, r = self.summary(), trainer - rollout
        probability = np.abs(np.exp(trainer) - np.exp(rollout))
        middle = np.logaddexp(trainer, rollout) - np.log(2.0)
        to_middle = [np.mean(np.expm1(middle - side) - (middle - side)) for side in (trainer, rollout)]
        return {
            "token_mult_prob_error": float(np.mean(np.exp(np.abs(r)))),
            "gen_kl_error": own["gap/k3"],
            "policy_kl_error": own["gap/k3_reverse"],
            "js_divergence_error": float(0.5 * sum(to_middle)),
            "training/rollout_probs_diff_mean": float(probability.mean()),
            "training/rollout_probs_diff_max": float(probability.max()),
            "training/rollout_probs_diff_std": float(probability.std(ddof=1)) if r.size > 1 else 0.0,
            "rollout_corr/kl": float(-r.mean()),
            "rollout_corr/k3_kl": own["gap/k3"],
            "train_rollout_logprob_abs_diff": own["gap/mean"],
            "ess_ratio": own["gap/ess"],
            "sampling/sampling_logp_difference/mean": own["gap/mean"],
            "sampling/sampling_logp_difference/max": own["gap/max"],
            "sampling/importance_sampling_ratio/min": float(np.exp(r).min()),
            "sampling/importance_sampling_ratio/mean": float(np.exp(r).mean()),
            "sampling/importance_sampling_ratio/max": float(np.exp(r).max()),
        }


def mean_interval(values: np.ndarray, *, confidence: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Bootstrap (BCa) confidence interval of the mean of independent `values` (scipy.stats.bootstrap).

    A sample without spread has its value as both ends; fewer than two values have no interval (NaN, NaN).
    """
    if values.size < 2:
        return (float("nan"), float("nan"))
    if np.ptp(values) == 0:
        return (float(values[0]), float(values[0]))
    result = bootstrap((values,), np.mean, confidence_level=confidence, rng=np.random.default_rng(seed))
    return (float(result.confidence_interval.low), float(result.confidence_interval.high))


def token_logps(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability (float32, [..., T-1]) of each next token: logits [..., T, V], tokens [..., T]."""
    scaled = logits[..., :-1, :].float() / temperature
    chosen = scaled.gather(-1, tokens[..., 1:].unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(scaled, dim=-1)
