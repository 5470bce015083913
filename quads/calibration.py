"""Static activation scales for stock checkpoints: the largest |activation| that reaches each selected weight."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quads.operand import OperandWeight
from quads.recipes import Recipe
from quads.rollout import install, restore
from quads.sites import find_sites


@torch.no_grad()
def activation_amax(model: nn.Module, recipe: Recipe, batches: Iterable[Tensor]) -> dict[str, float]:
    """Run token batches [B, T] through `model`; the amax per selected weight, 0 where no token reached it."""
    sites = find_sites(model, recipe)
    products = {site.name: _Recorder(site.weight) for site in sites}
    saved = [(site, install(site, _operand(site.parameter, site.transposed, products[site.name]))) for site in sites]
    try:
        for batch in batches:
            model(batch)
    finally:
        for site, parameter in saved:
            restore(site, parameter)
    return {name: product.amax for name, product in products.items()}


def _operand(parameter: Tensor, transposed: bool, product: _Recorder) -> OperandWeight:
    return OperandWeight.wrap(parameter.detach().clone(), product, k_last=not transposed)


class _Recorder:
    """The plain product; remembers the largest |x|."""

    def __init__(self, weight: Tensor, parent: _Recorder | None = None) -> None:
        self.weight, self.parent, self.amax = weight, parent, 0.0

    def expert(self, index: int) -> _Recorder:
        return _Recorder(self.weight[index], self)

    def matmul(self, x: Tensor) -> Tensor:
        self._record(x)
        return F.linear(x, self.weight)

    def grouped_matmul(self, x: Tensor, ends: Tensor) -> Tensor:
        bounds = [0, *ends.tolist()]
        parts = [self.expert(e).matmul(x[bounds[e] : bounds[e + 1]]) for e in range(len(ends))]
        return torch.cat([*parts, x.new_zeros(x.shape[0] - bounds[-1], self.weight.shape[-2])])

    def _record(self, x: Tensor) -> None:
        top = float(x.abs().max()) if x.numel() else 0.0
        self.amax = max(self.amax, top)
        if self.parent is not None:
            self.parent.amax = max(self.parent.amax, top)
