"""The one quantise-dequantise path: trainer, rollout, export and sync all quantise a weight here.

CPU tensors go through quads.emulation, CUDA tensors through quads.kernels, which is tested to give the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quads.emulation import dialects, layout, quantizers
from quads.emulation.dialects import EXACT, Dialect
from quads.emulation.formats import E2M1_MAX
from quads.emulation.quantizers import BLOCK, NVFP4Tensor
from quads.kernels import fake_quant
from quads.recipes import Recipe
from quads.sites import Site

# E4M3 value that amax is mapped to; four-over-six leaves room to scale a block by 1.5.
OUTER_MAX = {"six": 448, "four_over_six": 256}


_DIALECTS = {
    ("1x16", "six"): "exact",
    ("16x16", "six"): "exact_16x16",
    ("1x16", "four_over_six"): "exact_four_over_six",
    ("16x16", "four_over_six"): "exact_four_over_six_16x16",
}


def weight_dialect(recipe: Recipe) -> Dialect:
    """The quantiser of a recipe's weights: `exact`, its 16x16 tiles, and its four-over-six (256 rule, MSE)."""
    return dialects.load(_DIALECTS[recipe.weight_block, recipe.block_rule])


@torch.no_grad()
def outer_scale(site: Site, recipe: Recipe, dtype: torch.dtype | None = None) -> Tensor:
    """Outer scale (float32, [] or [experts, 1, 1]) of a weight, from the amax of itself and its partners.

    g = amax / (6 * 448), or amax / (6 * 256) under four-over-six; 1 where amax is 0. `dtype`: what the weight is
    quantised in, `site.dtype` where None. Rounding is monotone: amax rounded is the amax of the rounded weight.
    """
    amax = torch.stack([_amax(partner.weight) for partner in site.partners or (site,)]).amax(dim=0)
    return outer_from_amax(amax.to(dtype or site.dtype).float(), recipe)


def outer_from_amax(amax: Tensor, recipe: Recipe) -> Tensor:
    """`outer_scale` from the largest magnitude (float32, [] or [experts, 1, 1])."""
    # A tensor, not a Python scalar: torch multiplies by a scalar's rounded reciprocal on CUDA.
    largest = torch.full_like(amax, E2M1_MAX * OUTER_MAX[recipe.block_rule])
    return torch.where(amax == 0, torch.ones_like(amax), amax / largest)


def _amax(weight: Tensor) -> Tensor:
    """Largest magnitude (float32) of a weight, [] or [experts, 1, 1]; NaN where one is in it."""
    if weight.is_cuda and not isinstance(weight, DTensor) and weight.is_contiguous():
        from quads.kernels.amax import group_amax

        experts = weight.shape[0] if weight.ndim > 2 else 1
        return group_amax(weight.detach(), experts).reshape((-1, 1, 1) if weight.ndim > 2 else ())
    return whole(weight.abs().amax(dim=(-2, -1), keepdim=weight.ndim > 2).float())


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor (every rank takes part); a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """One weight as a rollout stores it, K last: packed uint8 [..., N, K/2], scales uint8 (E4M3) [..., N, K/16],
    outer float32 [] or [experts, 1, 1]; `dtype` is the master's, as the forward sees it."""

    name: str
    packed: Tensor
    scales: Tensor
    outer: Tensor
    dtype: torch.dtype

    @property
    def quantized(self) -> NVFP4Tensor:
        return NVFP4Tensor(layout.unpack(self.packed), self.scales, self.outer)


def pack(
    weight: Tensor, recipe: Recipe, outer: Tensor, name: str = "weight", *, into: PackedWeight | None = None
) -> PackedWeight:
    """Quantise and pack `weight` [..., N, K] with `outer`, or in place of `into`; ValueError names `name` and the rule.

    On CUDA only the outer scale is looked at for NaN and Inf, by whoever computed it: no wait for the GPU here.
    """
    weight = weight.detach()
    if weight.is_cuda and weight_dialect(recipe) == EXACT:
        packed, scales = _pack_on_gpu(weight, outer, into)
    else:
        quantizers.check_input(weight, name)
        q = quantizers.quantize(weight, outer, dialect=weight_dialect(recipe))
        packed, scales = q.packed, q.scales
    if into is None:
        return PackedWeight(name, packed, scales, outer, weight.dtype)
    for held, new in ((into.packed, packed), (into.scales, scales), (into.outer, outer)):
        if held.data_ptr() != new.data_ptr():
            held.copy_(new)
    return into


def _pack_on_gpu(weight: Tensor, outer: Tensor, into: PackedWeight | None) -> tuple[Tensor, Tensor]:
    from quads.kernels import quantize

    per_row = outer.ndim > 0
    rows = outer.expand(*weight.shape[:-1], 1).reshape(-1, 1) if per_row else outer
    out = None if into is None else (into.packed.flatten(0, -2), into.scales.flatten(0, -2))
    q = quantize.quantize(weight, rows, granularity="token" if per_row else "tensor", out=out)
    return q.packed.view(*weight.shape[:-1], -1), q.scales.view(*weight.shape[:-1], -1)


def fake_quantize(weight: Tensor, recipe: Recipe, outer: Tensor) -> Tensor:
    """Q(W) in the dtype of `weight`, with a straight-through gradient.

    A DTensor is quantised shard by shard with the outer scale of the whole; ValueError where its shards cut a 16-block.
    """
    if not isinstance(weight, DTensor):
        return _fake_quantize(weight, recipe, outer)
    for mesh_dim, placement in enumerate(weight.placements):
        if placement.is_shard(weight.ndim - 1) and weight.shape[-1] % (BLOCK * weight.device_mesh.size(mesh_dim)):
            raise ValueError(
                f"weight of shape {tuple(weight.shape)} is sharded along K over {weight.device_mesh.size(mesh_dim)}"
                f" ranks: the shards cut a block of {BLOCK}"
            )
    shard = _fake_quantize(weight.to_local(), recipe, outer)
    return DTensor.from_local(shard, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride())


def _fake_quantize(weight: Tensor, recipe: Recipe, outer: Tensor) -> Tensor:
    if recipe.block_rule == "six":
        return fake_quant.fake_quantize(weight, outer, weight_block=recipe.weight_block)  # type: ignore[arg-type]
    return _FourOverSix.apply(weight, recipe, outer)


@fake_quant.fake_quantize_op.register_kernel("cpu")
def _fake_quantize_on_cpu(x: Tensor, outer: Tensor | None, weight_block: str, granularity: str) -> Tensor:
    """The custom op's CPU implementation: the emulator. `outer` holds one scale for each run of consecutive rows."""
    dialect = dialects.load(_DIALECTS[weight_block, "six"])
    if outer is None:
        q = quantizers.quantize(x, granularity=granularity, dialect=dialect)  # type: ignore[arg-type]
        return quantizers.dequantize(q, x.dtype)
    runs = x.reshape(outer.numel(), -1, x.shape[-1]) if outer.numel() > 1 else x
    q = quantizers.quantize(runs, outer.reshape(-1, 1, 1) if outer.numel() > 1 else outer.reshape(()), dialect=dialect)
    return quantizers.dequantize(q, x.dtype).reshape(x.shape)


class _FourOverSix(torch.autograd.Function):
    """The emulator on any device: four-over-six has no kernel."""

    @staticmethod
    def forward(ctx, weight: Tensor, recipe: Recipe, outer: Tensor) -> Tensor:
        return quantizers.dequantize(pack(weight, recipe, outer).quantized, weight.dtype)

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
    amax = tiles.abs().amax(dim=(-3, -1), keepdim=True)
    scale = amax / torch.full_like(amax, quantizers.formats.E4M3_MAX)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = (tiles / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2).flatten(-3, -2)[..., :rows, :k]
