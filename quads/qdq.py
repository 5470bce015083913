"""The one quantise-dequantise path: trainer, rollout, export and sync all quantise a weight here.

CPU tensors go through quads.emulation, CUDA tensors through quads.kernels, which is tested to give the same bytes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quads.emulation import quantizers
from quads.emulation.dialects import EXACT, Dialect
from quads.emulation.formats import E2M1_MAX
from quads.emulation.quantizers import BLOCK, NVFP4Tensor
from quads.recipes import Recipe
from quads.sites import Site


@lru_cache(maxsize=64)
def weight_dialect(recipe: Recipe) -> Dialect:
    """The quantiser of a recipe's weights: `exact`, with its tile and, for four-over-six, the 256 rule and MSE."""
    if recipe.block_rule == "six":
        return EXACT.replace(tile=recipe.weight_block)
    return EXACT.replace(tile=recipe.weight_block, rule="mse", outer_max=256)


@torch.no_grad()
def outer_scale(site: Site, recipe: Recipe) -> Tensor:
    """Outer scale (float32, [] or [experts, 1, 1]) of a weight, from the amax of itself and its partners.

    g = amax / (6 * 448), or amax / (6 * 256) under four-over-six; 1 where amax is 0.
    """
    amax = torch.stack([_amax(partner.weight) for partner in site.partners or (site,)]).amax(dim=0)
    largest = E2M1_MAX * weight_dialect(recipe).outer_max
    return torch.where(amax > 0, amax / largest, torch.ones_like(amax))


def _amax(weight: Tensor) -> Tensor:
    return whole(weight.abs().amax(dim=(-2, -1), keepdim=weight.ndim > 2).float())


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor (every rank takes part); a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def quantize_weight(weight: Tensor, recipe: Recipe, outer: Tensor, name: str = "weight") -> NVFP4Tensor:
    """Codes, block scales and outer scale of `weight` [..., N, K]; ValueError names `name` and the rule."""
    quantizers.check_input(weight, name)
    return quantizers.quantize(weight.detach(), outer, dialect=weight_dialect(recipe))


def fake_quantize(weight: Tensor, recipe: Recipe, outer: Tensor) -> Tensor:
    """Q(W) in the dtype of `weight`, with a straight-through gradient.

    A DTensor is quantised shard by shard with the outer scale of the whole; ValueError where its shards cut a 16-block.
    """
    if not isinstance(weight, DTensor):
        return _FakeQuantize.apply(weight, recipe, outer)
    for mesh_dim, placement in enumerate(weight.placements):
        if placement.is_shard(weight.ndim - 1) and weight.shape[-1] % (BLOCK * weight.device_mesh.size(mesh_dim)):
            raise ValueError(
                f"weight of shape {tuple(weight.shape)} is sharded along K over {weight.device_mesh.size(mesh_dim)}"
                f" ranks: the shards cut a block of {BLOCK}"
            )
    shard = _FakeQuantize.apply(weight.to_local(), recipe, outer)
    return DTensor.from_local(shard, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride())


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, recipe: Recipe, outer: Tensor) -> Tensor:
        return quantizers.dequantize(quantize_weight(weight, recipe, outer), weight.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def fp8_weight(weight: Tensor, block: int = 128) -> Tensor:
    """Q(W) of the FP8 baseline as float32: E4M3 codes with one FP32 scale (amax / 448) per 128x128 block."""
    return _fp8(weight.float(), (block, block))


def fp8_activation(x: Tensor, group: int = 128) -> Tensor:
    """Q(X) of the FP8 baseline as float32: E4M3 codes with one FP32 scale (amax / 448) per 1x128 group."""
    return _fp8(x.float(), (1, group))


def _fp8(x: Tensor, block: tuple[int, int]) -> Tensor:
    """E4M3 quantise-dequantise in tiles of `block`; a ragged edge is a smaller tile."""
    rows, k = x.shape[-2:]
    pad = (0, -k % block[1], 0, -rows % block[0])
    tiles = torch.nn.functional.pad(x, pad).unflatten(-2, (-1, block[0])).unflatten(-1, (-1, block[1]))
    scale = tiles.abs().amax(dim=(-3, -1), keepdim=True) / quantizers.formats.E4M3_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = (tiles / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2).flatten(-3, -2)[..., :rows, :k]
