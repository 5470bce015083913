"""Paired differences with honest intervals at two to eight seeds, and the difference that they could have shown.

A sample maps a group (a seed, or a draw of the probe) to its values: one number, or one a unit (a held-out problem).
Arms are paired by group and unit. Groups and units are crossed (every seed is asked the same problems), so the
bootstrap resamples seeds and, independently, problems (the pigeonhole bootstrap: Owen, Annals of Applied Statistics
1, 2007), through scipy.stats.bootstrap.

A bootstrap of few groups is too narrow: its variance lacks a factor n / (n - 1) and its tails are normal, not t
(Hesterberg, The American Statistician 69, 2015). Its deviations from the mean are therefore stretched to the unbiased
standard error and to Student's t with Satterthwaite's degrees of freedom of the two sources. At two seeds this makes
intervals as wide as two seeds deserve. Outcomes of yes or no have the interval of Agresti and Min (Statistics in
Medicine 24, 2005), which does not shrink to a point where all pairs agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import optimize
from scipy.stats import bootstrap, nct, norm
from scipy.stats import t as student

CONFIDENCE, POWER = 0.95, 0.8
RESAMPLES = 2000
_NOTHING = 1e-100  # a spread whose square is lost
_ROUNDING = 1e-12  # share of the values' range below which a spread of means is rounding
_UNITS = (64, 128)  # as few and as many buckets as units are averaged into before they are resampled

Sample = Mapping[int, np.ndarray]


class UnpairedError(ValueError):
    """Two samples that share no group, or whose units are not the same in number."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its 95 % interval, standard error, degrees of freedom and number of groups (pairs).

    low and high are NaN where the values say nothing of their mean's spread. The interval of a single group is that of
    its units: it says nothing about other groups.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    se: float = math.nan
    df: float = math.nan
    pairs: int = 1

    @property
    def mde(self) -> float:
        """Minimum detectable difference at 80 % power of a repetition with this spread; NaN where it is unknown."""
        return minimum_detectable(self.se, self.df)


def difference(arm: Sample, against: Sample, *, binary: bool = False) -> Interval:
    """Mean of arm - against over the groups that both have. UnpairedError where there is nothing to pair."""
    return interval(paired(arm, against), binary=binary)


def paired(arm: Sample, against: Sample) -> np.ndarray:
    """arm - against, float64 [groups, units], for the groups that both have."""
    groups = sorted(arm.keys() & against.keys())
    if not groups:
        raise UnpairedError(f"nothing to pair: groups {sorted(arm)} and {sorted(against)} have none in common")
    for group in groups:
        if arm[group].shape != against[group].shape:
            sizes = f"{arm[group].size} and {against[group].size}"
            raise UnpairedError(f"group {group} has {sizes} values: they are not of the same units")
    return matrix({group: arm[group] - against[group] for group in groups})


def matrix(sample: Sample) -> np.ndarray:
    """The sample as float64 [groups, units]; UnpairedError where groups differ in their units."""
    rows = [np.atleast_1d(sample[group]).astype(np.float64) for group in sorted(sample)]
    if len({row.size for row in rows}) != 1:
        raise UnpairedError(f"groups have {sorted({row.size for row in rows})} values: they are not of the same units")
    return np.stack(rows)


def interval(values: np.ndarray, *, binary: bool = False) -> Interval:
    """Mean of values [groups, units] with its 95 % interval; `binary` for -1, 0, 1 a group (one unit)."""
    if not np.isfinite(values).all():
        raise ValueError(f"{(~np.isfinite(values)).sum()} of {values.size} values are not finite")
    pairs, value = len(values), float(values.mean())
    if values.size == 1:
        return Interval(value=value)
    if binary:
        return _agresti_min(values[:, 0])
    if np.ptp(values) < _NOTHING:
        return Interval(value=value, low=value, high=value, se=0.0, df=values.size - 1, pairs=pairs)
    values = _bucketed(values)
    se, df = _spread(values)
    if math.isnan(df):
        return Interval(value=value, pairs=pairs)
    means = _resampled_means(values)
    tail = (1 - CONFIDENCE) / 2
    stretch = student.isf(tail, df) / norm.isf(tail) * se / means.std(ddof=1)
    low, high = value + stretch * (np.quantile(means, [tail, 1 - tail]) - value)
    return Interval(value=value, low=float(low), high=float(high), se=se, df=df, pairs=pairs)


def minimum_detectable(se: float, df: float, *, power: float = POWER, confidence: float = CONFIDENCE) -> float:
    """The true difference that a two-sided t test of this standard error finds with `power` (noncentral t)."""
    if not (math.isfinite(se) and df > 0) or se == 0:
        return se
    critical = student.isf((1 - confidence) / 2, df)
    if math.isinf(df):
        return float(se * (critical + norm.isf(1 - power)))
    # The chance of rejecting in the wrong direction is below 1e-4 at this power.
    return float(se * optimize.brentq(lambda shift: nct.sf(critical, df, shift) - power, 0.0, 4 * critical))


def _bucketed(values: np.ndarray) -> np.ndarray:
    """Thousands of units averaged in equal buckets, which are as independent as they: same mean, same error, faster."""
    groups, units = values.shape
    least, most = _UNITS
    counts = [count for count in range(least, most + 1) if units % count == 0]
    return values.reshape(groups, counts[-1], -1).mean(axis=2) if units > most and counts else values


def _spread(values: np.ndarray) -> tuple[float, float]:
    """Standard error of the mean of [groups, units] and its degrees of freedom.

    The variances of the group means and of the unit means add (noise of single cells counts twice: on the safe side).
    NaN where cells differ but neither means do: then nothing is known.
    """
    means = [values.mean(axis=1 - axis) for axis in (0, 1) if values.shape[axis] > 1]
    parts = np.array([mean.var(ddof=1) / mean.size for mean in means])
    if parts.sum() <= (_ROUNDING * np.ptp(values)) ** 2:
        return math.nan, math.nan
    shares = parts / parts.sum()
    df = 1 / sum(share**2 / (mean.size - 1) for share, mean in zip(shares, means, strict=True))
    return float(np.sqrt(parts.sum())), float(df)


def _resampled_means(values: np.ndarray) -> np.ndarray:
    """Bootstrap distribution of the mean, groups and units resampled independently."""
    axes = [axis for axis in (0, 1) if values.shape[axis] > 1]

    def mean(*chosen: np.ndarray, axis: int) -> np.ndarray:
        shares = {a: _shares(index, values.shape[a]) for a, index in zip(axes, chosen, strict=True)}
        rows = shares[0] @ values if 0 in shares else values[0]
        return (rows * shares[1]).sum(-1) if 1 in shares else rows[..., 0]

    result = bootstrap(
        [np.arange(values.shape[axis]) for axis in axes],
        mean,
        method="percentile",
        n_resamples=RESAMPLES,
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    return np.asarray(result.bootstrap_distribution)


def _shares(index: np.ndarray, size: int) -> np.ndarray:
    """How often each of `size` members was drawn, as a share: [..., draws] -> [..., size]."""
    flat = index.reshape(-1, index.shape[-1])
    offset = flat + size * np.arange(len(flat))[:, None]
    counts = np.bincount(offset.ravel(), minlength=size * len(flat))
    return counts.reshape(*index.shape[:-1], size) / index.shape[-1]


def _agresti_min(signs: np.ndarray) -> Interval:
    """Paired shares: half a pair is added to each cell of the two-by-two table, then Wald's interval is taken."""
    n = signs.size
    up, down = ((signs > 0).sum() + 0.5) / (n + 2), ((signs < 0).sum() + 0.5) / (n + 2)
    se = float(np.sqrt((up + down - (up - down) ** 2) / (n + 2)))
    reach = norm.isf((1 - CONFIDENCE) / 2) * se
    low, high = np.clip([up - down - reach, up - down + reach], -1, 1)
    return Interval(value=float(signs.mean()), low=float(low), high=float(high), se=se, df=math.inf, pairs=n)
