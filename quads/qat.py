"""The QUADS trainer: quantisation-aware training on any transformers causal LM.

`prepare_qat` parametrises each selected weight (torch.nn.utils.parametrize): the module's forward sees Q(W), the
optimiser the untouched master. Asymmetric QAT leaves activations alone; symmetric QAT quantises them too.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from quads import qdq
from quads.errors import NonFiniteError
from quads.kernels import fake_quant
from quads.operand import OperandWeight
from quads.recipes import Recipe, RecipeError
from quads.sites import Site, find_sites


def prepare_qat(model: nn.Module, recipe: Recipe) -> list[str]:
    """Make `model` train under the trainer numerics of `recipe`, in place; returns the quantised weights' names.

    A recipe that trains in BF16 changes nothing and returns []. RecipeError or ValueError (no such layer, K % 16,
    tied embeddings, NaN or Inf in a weight, already prepared) leaves the model as it was found.
    """
    if recipe.train_weights == "bf16":
        return []
    sites = find_sites(model, recipe)
    for site in sites:
        if parametrize.is_parametrized(site.module, site.attribute):
            raise RecipeError(f"{site.name} is parametrised already: call remove_qat first")
        check_weight(site)
    for site in sites:
        quantizer = FakeQuantizedWeight(site, recipe)
        parametrize.register_parametrization(site.module, site.attribute, quantizer, unsafe=True)
        if site.adapter is not None:
            # The delta is inside Q(W + delta): the adapter's own branch would add it twice.
            site.adapter.forward = site.module.forward  # type: ignore[method-assign]
    return [site.name for site in sites]


def remove_qat(model: nn.Module) -> None:
    """Undo `prepare_qat`: the master weights are ordinary parameters again."""
    for module in list(model.modules()):
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module) and parametrize.is_parametrized(base):
            module.__dict__.pop("forward", None)
    for module in list(model.modules()):
        for attribute in list(getattr(module, "parametrizations", {})):
            if isinstance(module.parametrizations[attribute][0], FakeQuantizedWeight):  # type: ignore[index]
                parametrize.remove_parametrizations(module, attribute, leave_parametrized=False)


def check_weight(site: Site) -> None:
    """Raise ValueError, naming the weight and the expert, where a master weight holds NaN or Inf."""
    if site.weight.is_meta:  # a rank that receives its weights later
        return
    bad = ~site.weight.detach().isfinite()
    if bool(bad.any()):
        index = [int(i) for i in bad.nonzero()[0]]
        expert = f" expert {index[0]}" if len(index) == 3 else ""
        raise NonFiniteError(f"{site.name}{expert} holds NaN or Inf at {index}: refuse to quantise it")


class FakeQuantizedWeight(nn.Module):
    """The parametrisation of one weight: master in, Q(W) (or an operand that also quantises activations) out."""

    def __init__(self, site: Site, recipe: Recipe) -> None:
        super().__init__()
        self.__dict__["site"] = site  # not a submodule: the site points back at the module that owns this
        self.recipe = recipe

    def forward(self, stored: Tensor) -> Tensor:
        site, recipe = self.site, self.recipe
        master = site.k_last(site.merge(stored))
        value = qdq.fake_quantize(master, recipe, qdq.outer_scale(site, recipe, stored.dtype))
        if recipe.train_activations == "bf16" and recipe.backward == "dequantized":
            return site.k_last(value)
        return OperandWeight.wrap(site.k_last(value), TrainerProduct(recipe, master, value), k_last=not site.transposed)


class TrainerProduct:
    """Products of the trainer where Q(W) alone is not enough: quantised activations, or master values backward."""

    def __init__(self, recipe: Recipe, master: Tensor, value: Tensor) -> None:
        self.recipe, self.master, self.value = recipe, master, value

    def expert(self, index: int) -> TrainerProduct:
        return TrainerProduct(self.recipe, self.master[index], self.value[index])

    def matmul(self, x: Tensor) -> Tensor:
        return self._multiply(x, self._activation(x))

    def grouped_matmul(self, x: Tensor, ends: Tensor) -> Tensor:
        activation = self._activation(x)  # of all rows at once, as the rollout quantises them
        if x.dtype == torch.bfloat16 and x.is_cuda and self.recipe.backward == "dequantized":
            return F.grouped_mm(activation, self.value.to(x.dtype).transpose(-2, -1), offs=ends)
        bounds = [0, *ends.tolist()]
        rows = [slice(start, end) for start, end in itertools.pairwise(bounds)]
        groups = [self.expert(e)._multiply(x[part], activation[part]) for e, part in enumerate(rows)]
        return torch.cat([*groups, x.new_zeros(x.shape[0] - bounds[-1], self.value.shape[-2])])

    def _multiply(self, x: Tensor, activation: Tensor) -> Tensor:
        value = self.value.to(x.dtype)  # float32 masters may be computed with in bfloat16 (quads.compute)
        if self.recipe.backward == "dequantized":
            return F.linear(activation, value)
        return _MasterBackward.apply(x, activation.detach(), self.master, value.detach())

    def _activation(self, x: Tensor) -> Tensor:
        """Q(X) with a straight-through gradient, or X itself."""
        if self.recipe.train_activations == "bf16" or x.numel() == 0:
            return x
        return fake_quant.fake_quantize(x, granularity=self.recipe.activation_outer)  # type: ignore[arg-type]


class _MasterBackward(torch.autograd.Function):
    """Y = Q(X) Q(W)^T forward; dX = dY W and dW = dY^T X backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, x_value: Tensor, master: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(x, master)
        return F.linear(x_value, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, None]:
        x, master = ctx.saved_tensors
        # Under autocast the products are bfloat16 and the master is not; autograd casts dW back to its dtype.
        return grad @ master.to(grad.dtype), None, grad.transpose(-2, -1) @ x.to(grad.dtype), None
