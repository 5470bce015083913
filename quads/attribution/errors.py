"""Relative output error of every selected layer under every variant, from the reference's own inputs.

err(v) = ||Y_v - X W^T||_F / ||X W^T||_F over all real tokens, and for W4A4 also ||Y_v - X Q(W)^T||_F / ||X W^T||_F:
the weight and activation terms of method.md, with X as the reference computes it, so that one layer's error does not
travel into the next. Sums of squares are kept by token and by expert; prompts,
positions, layers and projections are sums over those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quads.attribution.inputs import InputCache
from quads.attribution.products import Groups, SiteWeights, squared_errors
from quads.attribution.variants import REFERENCE, WEIGHTS, Place, Variant

Key = tuple[str, str]  # variant, what its output is compared with


@dataclass
class SiteErrors:
    """Sums of squares of one weight: `by_token` float64 [keys, B, T], `by_expert` float64 [keys, experts].

    Row 0 is the reference itself, ||X W^T||^2.
    """

    place: Place
    by_token: Tensor
    by_expert: Tensor


class LocalErrors:
    """Observer of a layer-wise run: collects SiteErrors for `variants` (those that hold in every layer)."""

    def __init__(self, variants: list[Variant], shape: tuple[int, int]) -> None:
        self.variants, self.shape = variants, shape
        self.sites: dict[str, SiteErrors] = {}
        w4a4 = [(variant.name, WEIGHTS) for variant in variants if variant.weights and variant.activations]
        self.keys: list[Key] = [(variant.name, REFERENCE) for variant in variants] + w4a4
        self._row = {(REFERENCE, ""): 0, **{key: i for i, key in enumerate(self.keys, start=1)}}

    def observe(self, weights: SiteWeights, x: Tensor, tokens: Tensor, groups: Groups, cache: InputCache) -> None:
        """Add the squared errors of one product of the reference: x [M, K], `tokens` the flat token of each row."""
        rows = cache.get(x, weights.place.name, weights.index)
        record = self._record(weights)
        flat = record.by_token.flatten(1)
        for name, against, squares in squared_errors(self.variants, x, groups, weights, rows):
            row = self._row[name, against]
            flat[row].index_add_(0, tokens, squares)
            for part, expert in groups:
                record.by_expert[row, expert] += squares[part].sum()

    def _record(self, weights: SiteWeights) -> SiteErrors:
        name, count = weights.place.name, len(self.keys) + 1
        if name not in self.sites:
            by_token = torch.zeros(count, *self.shape, dtype=torch.float64)
            by_expert = torch.zeros(count, weights.master.shape[0], dtype=torch.float64)
            self.sites[name] = SiteErrors(weights.place, by_token, by_expert)
        return self.sites[name]

    def relative(self, name: str) -> dict[Key, float]:
        """Relative error of the weight `name` by key."""
        return self._by_key(_ratio(self.sites[name].by_token.flatten(1).sum(1)))

    def experts(self, name: str) -> dict[Key, list[float]]:
        """Relative error of each expert by key; an expert that saw no token has NaN."""
        return self._by_key(_ratio(self.sites[name].by_expert))

    def positions(self) -> dict[Key, list[float]]:
        """Relative error at each token position by key: mean over the weights that saw that position."""
        return self._average([_ratio(site.by_token.sum(1)) for site in self.sites.values()])

    def prompts(self) -> dict[Key, list[float]]:
        """Relative error of each prompt by key: mean over weights. What an interval over prompts is made of."""
        return self._average([_ratio(site.by_token.sum(2)) for site in self.sites.values()])

    def _average(self, tables: list[Tensor]) -> dict[Key, list[float]]:
        return self._by_key(torch.stack(tables).nanmean(dim=0))

    def _by_key(self, table: Tensor) -> dict[Key, Any]:
        return {key: table[i].tolist() for i, key in enumerate(self.keys)}


def _ratio(squares: Tensor) -> Tensor:
    """sqrt(error / reference); NaN where the reference has nothing."""
    reference = squares[0]
    return torch.where(reference > 0, squares[1:] / reference, torch.nan).sqrt()
