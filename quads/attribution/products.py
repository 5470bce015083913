"""What a selected layer computes under each variant, and how far that is from the reference for the same inputs.

Y = X W^T over rows sorted by expert (a dense layer is one expert). Quantised products are exact float32 values of
codes * block scales, summed in float32, outer scales applied once after the sum, one cast to the model's dtype.
The order of that float32 sum is the CPU library's; what a tensor core does instead belongs to the engine term.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from quads import qdq
from quads.attribution.inputs import QuantizedRows
from quads.attribution.variants import BOTH_VARIANT, REFERENCE, WEIGHTS, Place, Variant
from quads.emulation import quantizers, residual
from quads.qat import check_weight
from quads.recipes import Recipe
from quads.sites import Site

Groups = list[tuple[slice, int]]  # rows of each expert that has any


class SiteWeights:
    """One selected weight as [experts, N, K]: the master, and its quantised values when a variant first asks."""

    def __init__(self, site: Site, recipe: Recipe, index: int) -> None:
        check_weight(site)
        self.site, self.recipe, self.index = site, recipe, index
        self.place = Place(site.name)
        self.master = _experts(site.weight.detach())

    @cached_property
    def outer(self) -> Tensor:
        """Outer scale of each expert, float32 [experts]."""
        return qdq.outer_scale(self.site, self.recipe).reshape(-1).expand(self.master.shape[0])

    @property
    def codes(self) -> Tensor:
        """code * block scale in the master's dtype: six significant bits, so exact in bfloat16."""
        return self._quantized[0]

    @property
    def value(self) -> Tensor:
        """Q(W) in the master's dtype: what a QAT trainer multiplies by."""
        return self._quantized[1]

    @cached_property
    def _quantized(self) -> tuple[Tensor, Tensor]:
        """Expert by expert: quantising needs some 64 bytes an element for a moment, a layer of experts has billions."""
        codes, values = torch.empty_like(self.master), torch.empty_like(self.master)
        for expert, weight in enumerate(self.master):
            q = qdq.pack(weight, self.recipe, self.outer[expert], self.site.name).quantized
            codes[expert] = quantizers.unscaled(q)
            values[expert] = quantizers.dequantize(q, values.dtype)
        return codes, values


def _experts(weight: Tensor) -> Tensor:
    return weight if weight.ndim == 3 else weight.unsqueeze(0)


def groups_of(ends: Tensor) -> Groups:
    """Rows of every expert that has some; `ends` (int32 [experts]) is where each expert's rows end."""
    pairs = itertools.pairwise([0, *ends.tolist()])
    return [(slice(start, end), expert) for expert, (start, end) in enumerate(pairs) if end > start]


def outputs(variant: Variant, x: Tensor, groups: Groups, weights: SiteWeights, rows: QuantizedRows | None) -> Tensor:
    """Y [M, N] of `variant` in the dtype of x [M, K]; `rows` is x quantised (given where activations are)."""
    if rows is None:
        values = weights.value if variant.weights else weights.master
        return _product(x.float(), values, groups).to(x.dtype) if variant.engine else _product(x, values, groups)
    values = weights.codes if variant.weights else weights.master
    total = _product(rows.value, values, groups)
    if variant.ratio:
        columns, blocks = rows.columns(rows.keep(variant))
        total += _product(columns, values, groups, blocks)
    return (total * _alpha(variant, rows, weights, groups)).to(x.dtype)


Squares = tuple[str, str, Tensor]  # variant, what its output is compared with, squared error of each row (float64)


def squared_errors(
    variants: list[Variant], x: Tensor, groups: Groups, weights: SiteWeights, rows: QuantizedRows
) -> Iterator[Squares]:
    """Squared error of every variant's output for the same x [M, K], against X W^T and, for W4A4, against X Q(W)^T.

    The first item is the reference itself, ||X W^T||^2 (against nothing). Errors are taken in float32 before any
    cast, but for the engine term, which *is* two casts of one product.
    """
    exact = _product(x.float(), weights.master, groups)
    yield REFERENCE, "", _norms(exact)
    trainer = _product(x.float(), weights.value, groups)
    for variant in variants:
        if variant.engine:
            native = _product(x, weights.master, groups)
            yield variant.name, REFERENCE, _norms(native.float() - exact.to(x.dtype).float())
        elif not variant.activations:
            yield variant.name, REFERENCE, _norms(trainer - exact)
        elif not variant.weights:
            alpha = _alpha(variant, rows, weights, groups)
            yield variant.name, REFERENCE, _norms(_product(rows.value, weights.master, groups) * alpha - exact)
    for name, y in _ladder([v for v in variants if v.weights and v.activations], rows, groups, weights):
        yield name, REFERENCE, _norms(y - exact)
        yield name, WEIGHTS, _norms(y - trainer)


def _ladder(
    rungs: list[Variant], rows: QuantizedRows, groups: Groups, weights: SiteWeights
) -> Iterator[tuple[str, Tensor]]:
    """Outputs of W4A4 and its RAC ratios. A ratio keeps every block of each smaller one: a scope is summed by rungs."""
    alpha = _alpha(BOTH_VARIANT, rows, weights, groups)
    plain = _product(rows.value, weights.codes, groups)
    chains: dict[tuple[str, int], list[Variant]] = {}
    for variant in sorted(rungs, key=lambda rung: rung.ratio):
        chains.setdefault((variant.scope, variant.seed), []).append(variant)
    for chain in chains.values():
        total, done = plain.clone(), torch.zeros(1, rows.blocks, dtype=torch.bool)
        for variant in chain:
            keep = rows.keep(variant)
            columns, blocks = rows.columns(keep & ~done)
            total += _product(columns, weights.codes, groups, blocks)
            done = keep
            yield variant.name, total * alpha


def _product(x: Tensor, values: Tensor, groups: Groups, blocks: Tensor | None = None) -> Tensor:
    """x [M, K] by values [experts, N, K] (of which only the K-blocks `blocks`), in the dtype of x; [M, N]."""
    y = x.new_zeros(x.shape[0], values.shape[-2])
    for part, expert in groups:
        w = values[expert] if blocks is None else residual.gather_blocks(values[expert], blocks)
        y[part] = F.linear(x[part], w.to(x.dtype))
    return y


def _alpha(variant: Variant, rows: QuantizedRows, weights: SiteWeights, groups: Groups) -> Tensor:
    """What multiplies the float32 sum, [M, 1]: the outer scales of whichever operands are quantised."""
    alpha = rows.outer.clone()
    if variant.weights:
        for part, expert in groups:
            alpha[part] *= weights.outer[expert]
    return alpha


def _norms(error: Tensor) -> Tensor:
    return error.square().sum(dim=-1).double()
