"""A weight of a layer in the order of its device: kept once, rewritten in place, given back; no engine needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from quads import qdq, recipes
from quads.integrations.vllm_plugin import weights
from quads.kernels.quantize import quantize
from quads.qdq import PackedWeight
from tests.quads import engine

RECIPE = recipes.load("quads")
ORDER_ON = weights.order_on
SHAPES = {"dense": (100, 96), "experts": (3, 80, 48), "gate and up": (3, 2 * 40, 48)}
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def master(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    weight[..., 3, :16] = 0.0
    weight[..., 4, 16:32] *= 1e-6  # a block whose scale underflows: signs are all that is left of it
    return weight.bfloat16().to(device)


def packed(weight: Tensor) -> PackedWeight:
    amax = weight.abs().amax(dim=(-2, -1), keepdim=weight.ndim > 2).float()
    return qdq.pack(weight, RECIPE, qdq.outer_from_amax(amax, RECIPE))


def layer_of(weight: Tensor, *, gated: bool = False) -> Module:
    layer = Module()
    layer.register_parameter("w", Parameter(torch.empty_like(weight, device="meta"), requires_grad=False))
    weights.write(layer, "w", weights.derive(weight, RECIPE, "w", rows=[weight.shape[-2]], interleave=gated))
    return layer


def assert_holds(layer: Module, wanted: PackedWeight) -> None:
    held = weights.exported(layer, "w")
    for field in ("packed", "scales", "outer", "dtype"):
        mine, theirs = getattr(held, field), getattr(wanted, field)
        assert torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs, field


def storages(layer: Module) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in layer.named_parameters() if not p.is_meta}


@pytest.fixture(params=[*engine.ORDERS, pytest.param("the GPU's", marks=pytest.mark.gpu)])
def device(request: Any) -> Iterator[torch.device]:
    """A device, and its order of codes: each of them on the CPU, and that of the GPU which is here."""
    if request.param == "the GPU's":
        yield GPU
        return
    with engine.kept_in(engine.ORDERS[request.param]):
        yield CPU


@pytest.mark.parametrize("kind", list(SHAPES))
def test_a_weight_is_given_back_as_it_was_exported(kind: str, device: torch.device) -> None:
    weight = master(SHAPES[kind], 1, device)
    layer = layer_of(weight, gated=kind == "gate and up")
    assert_holds(layer, packed(weight))


@pytest.mark.parametrize("kind", list(SHAPES))
def test_a_rewritten_weight_lies_where_the_old_one_lay(kind: str, device: torch.device) -> None:
    weight, other = (master(SHAPES[kind], seed, device) for seed in (1, 2))
    layer = layer_of(weight, gated=kind == "gate and up")
    at = storages(layer)
    weights.rewrite(layer, "w", packed(other), RECIPE)
    assert storages(layer) == at
    assert_holds(layer, packed(other))
    weights.write(layer, "w", weights.derive(weight, RECIPE, "w", rows=[], interleave=kind == "gate and up"))
    assert storages(layer) == at
    assert_holds(layer, packed(weight))


def test_nothing_is_kept_twice(device: torch.device) -> None:
    weight = master((4, 128, 64), 1, device)  # whole tiles of every order
    layer, wanted = layer_of(weight), packed(weight)
    kept = sum(p.numel() for _, p in layer.named_parameters() if p.dtype == torch.uint8)
    assert kept == wanted.packed.numel() + wanted.scales.numel()
    assert len(storages(layer)) == 3


def test_values_of_unquantised_activations_follow_a_rewrite() -> None:
    recipe = RECIPE.replace(rollout_activations="bf16", rac_ratio=0.0)
    weight, other = (master((64, 32), seed, CPU) for seed in (1, 2))
    layer = Module()
    layer.register_parameter("w", Parameter(torch.empty_like(weight, device="meta"), requires_grad=False))
    weights.write(layer, "w", weights.derive(weight, recipe, "w", rows=[64]))
    weights.rewrite(layer, "w", packed(other), recipe)
    assert_holds(layer, packed(other))
    wanted = weights.derive(other, recipe, "w", rows=[64])[weights.VALUE]
    assert torch.equal(layer._parameters["w" + weights.VALUE], wanted)  # type: ignore[arg-type]


def test_a_gpu_reorders_for_its_kernels_and_a_cpu_keeps_what_was_exported() -> None:
    pytest.importorskip("triton")
    from quads.kernels import gemm

    assert ORDER_ON(GPU) is gemm.prepare_weight
    assert ORDER_ON(CPU) is None


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 64, 512])
def test_a_captured_graph_multiplies_by_the_rewritten_weight(tokens: int) -> None:
    from quads.kernels import gemm

    weight, other = (master((256, 512), seed, GPU) for seed in (1, 2))
    layer, x = layer_of(weight), quantize(torch.randn(tokens, 512, device=GPU).bfloat16())
    first = gemm.gemm(x, weights.prepared(layer, "w"))  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gemm.gemm(x, weights.prepared(layer, "w"))
    graph.replay()
    assert torch.equal(y, first)
    weights.rewrite(layer, "w", packed(other), RECIPE)
    graph.replay()
    assert torch.equal(y, gemm.gemm(x, gemm.prepare_weight(packed(other))))
    assert not torch.equal(y, first)


@pytest.mark.gpu
def test_a_rewrite_takes_no_more_than_four_times_the_codes() -> None:
    weight = master((8, 1024, 2048), 1, GPU)
    layer, new = layer_of(weight), packed(weight)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    weights.rewrite(layer, "w", new, RECIPE)
    assert torch.cuda.max_memory_allocated() - before <= 4 * new.packed.numel()
