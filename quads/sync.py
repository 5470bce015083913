"""Weight sync: what the rollout receives, and the proof that it is what the trainer sees.

`export_weights` streams packed codes, block scales and outer scales, one weight at a time. `verify_sync` compares, bit
for bit, the trainer's fake-quantised weight with the dequantised weight of a rollout, for every selected tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from quads import qdq
from quads.emulation import quantizers
from quads.emulation.quantizers import NVFP4Tensor
from quads.qat import FakeQuantizedWeight, check_weight
from quads.qdq import PackedWeight
from quads.recipes import Recipe, RecipeError
from quads.sites import Site, find_sites


class SyncError(ValueError):
    """Trainer and rollout disagree about a weight; the message names the first element with both derivations."""


def export_weights(
    model: nn.Module, recipe: Recipe, into: Mapping[str, PackedWeight] | None = None
) -> Iterator[PackedWeight]:
    """Quantise the master weights that `recipe` selects, one at a time, in module order, as the forward sees them.

    Under FSDP2's mixed precision they are first rounded to its `param_dtype`; `Site.dtype` says what casts are unknown.
    Never more than one weight is held beside the model. `into` (an earlier export, say what CUDA graphs captured) is
    written in place instead. Every weight is looked at before the first is handed over: RecipeError where the recipe
    has no NVFP4 weights, ValueError naming a weight with NaN or Inf, and then nothing was written.
    """
    if recipe.rollout_weights != "nvfp4":
        raise RecipeError(f"recipe field 'rollout_weights' is '{recipe.rollout_weights}': only nvfp4 exports packed")
    sites = find_sites(model, recipe)
    outers = [qdq.outer_scale(site, recipe) for site in sites]
    _refuse_nonfinite(sites, outers)
    for site, outer in zip(sites, outers, strict=True):
        with torch.no_grad():
            held = into[site.name] if into is not None else None
            packed = qdq.pack(qdq.whole(site.weight), recipe, outer, site.name, into=held)
        yield packed


def _refuse_nonfinite(sites: list[Site], outers: list[Tensor]) -> None:
    """One look at all outer scales, which hand NaN and Inf on: a single wait for a GPU."""
    finite = torch.stack([outer.isfinite().all() for outer in outers]).tolist()
    for site, good in zip(sites, finite, strict=True):
        if not good:
            check_weight(site)


def verify_sync(trainer: nn.Module, recipe: Recipe, rollout: Iterable[PackedWeight]) -> int:
    """Check every weight of `rollout` (an export, or what an engine holds) against what `trainer` computes with.

    `trainer`: the module that FSDP2 wrapped outermost; what it computes with is known as far as `Site.dtype` is.
    Returns the number of weights compared. SyncError on the first differing element, a missing or an extra weight.
    """
    sites = {site.name: site for site in find_sites(trainer, recipe)}
    compared = set()
    for packed in rollout:
        if packed.name not in sites:
            raise SyncError(f"the rollout holds {packed.name}, which the recipe does not select in the trainer")
        _compare(sites[packed.name], recipe, packed)
        compared.add(packed.name)
    missing = sorted(set(sites) - compared)
    if missing:
        raise SyncError(f"the rollout lacks {len(missing)} of {len(sites)} weights, first {missing[0]}")
    return len(compared)


@torch.no_grad()
def trainer_weight(site: Site, recipe: Recipe) -> Tensor:
    """The weight, K last, that the trainer's forward multiplies by under QAT (also where QAT is not installed)."""
    parametrizations = getattr(site.module, "parametrizations", None)
    if parametrizations is not None and site.attribute in parametrizations:
        quantizer = parametrizations[site.attribute][0]
        if isinstance(quantizer, FakeQuantizedWeight):
            return site.k_last(quantizer(qdq.whole(site.stored)).as_subclass(Tensor))
    return qdq.fake_quantize(qdq.whole(site.weight), recipe, qdq.outer_scale(site, recipe))


def _compare(site: Site, recipe: Recipe, packed: PackedWeight) -> None:
    ours = trainer_weight(site, recipe)
    theirs = quantizers.dequantize(packed.quantized, ours.dtype)
    if ours.shape != theirs.shape:
        raise SyncError(f"{site.name}: trainer has shape {tuple(ours.shape)}, rollout {tuple(theirs.shape)}")
    integer = {2: torch.int16, 4: torch.int32}[ours.element_size()]
    differs = ours.contiguous().view(integer) != theirs.contiguous().view(integer)
    if bool(differs.any()):
        raise SyncError(_derivations(site, recipe, packed, differs))


def _derivations(site: Site, recipe: Recipe, packed: PackedWeight, differs: Tensor) -> str:
    index = tuple(int(i) for i in differs.nonzero()[0])
    weight = qdq.whole(site.weight.detach())
    q = qdq.pack(weight, recipe, qdq.outer_scale(site, recipe), site.name).quantized
    return (
        f"{site.name}: {int(differs.sum())} of {differs.numel()} elements differ, first {list(index)} of master"
        f" {float(weight[index])!r}: trainer {_derive(q, index)}, rollout {_derive(packed.quantized, index)}"
    )


def _derive(q: NVFP4Tensor, index: tuple[int, ...]) -> str:
    code = int(q.codes[index])
    scale = int(q.scales[(*index[:-1], index[-1] // quantizers.BLOCK)])
    outer = float(q.outer.expand(*q.codes.shape[:-1], 1)[(*index[:-1], 0)])
    value = float(quantizers.dequantize(q)[index])
    return f"code 0x{code:X} * scale 0x{scale:02X} * outer {outer!r} = {value!r}"
