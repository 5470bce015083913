"""The trainer's fake-quantised weight equals the rollout's dequantised weight bit for bit, and a lie is named."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quads import recipes
from quads.qat import prepare_qat
from quads.qdq import PackedWeight
from quads.recipes import RecipeError
from quads.rollout import rollout_numerics
from quads.sync import SyncError, export_weights, verify_sync
from tests.quads.tiny import FAMILIES, tiny_model

QUADS = recipes.named()["quads"].replace(modules=(r"_proj$", r"\.experts\."))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_export_and_rollout_agree(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=dtype)
    exported = list(export_weights(model, QUADS))
    with rollout_numerics(model, QUADS) as rollout:
        running = list(rollout.packed_weights())
    prepare_qat(model, QUADS)
    assert verify_sync(model, QUADS, exported) == verify_sync(model, QUADS, running) == len(exported) > 0


@given(st.integers(0, 10**6), st.floats(-30, 30))
def test_they_agree_at_any_scale_after_any_step(seed: int, log_scale: float) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(32, 8, bias=False))
    torch.nn.init.normal_(layer[0].weight, generator=torch.Generator().manual_seed(seed))
    layer[0].weight.data *= 2.0**log_scale
    recipe = QUADS.replace(modules=("^0$",))
    exported = list(export_weights(layer, recipe))
    prepare_qat(layer, recipe)
    assert verify_sync(layer, recipe, exported) == 1


def corrupt(weight: PackedWeight, field: str) -> PackedWeight:
    tensor = getattr(weight, field).clone()
    if field == "outer":
        tensor = torch.nextafter(tensor, torch.tensor(torch.inf))
    else:
        tensor.view(-1)[37] ^= 1
    return dataclasses.replace(weight, **{field: tensor})


@pytest.mark.parametrize("field", ["packed", "scales", "outer"])
def test_one_wrong_bit_is_found_and_both_derivations_are_printed(field: str) -> None:
    model = tiny_model()
    exported = list(export_weights(model, QUADS))
    exported[2] = corrupt(exported[2], field)
    prepare_qat(model, QUADS)
    with pytest.raises(SyncError, match=exported[2].name) as caught:
        verify_sync(model, QUADS, exported)
    assert "trainer code 0x" in str(caught.value) and "rollout code 0x" in str(caught.value)


def test_a_stale_missing_or_extra_weight_is_named() -> None:
    model = tiny_model()
    exported = list(export_weights(model, QUADS))
    with pytest.raises(SyncError, match="lacks 1 of"):
        verify_sync(model, QUADS, exported[1:])
    with pytest.raises(SyncError, match="holds other, which the recipe does not select"):
        verify_sync(model, QUADS, [dataclasses.replace(exported[0], name="other")])
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[1] *= 1.5  # a training step after the sync
    with pytest.raises(SyncError, match=r"layers\.0\.mlp\.experts\.down_proj"):
        verify_sync(model, QUADS, exported)


def test_gate_and_up_sharing_rule_matters() -> None:
    """The planted fault: gate's own outer scale for both halves (vLLM #54974) is caught."""
    model = tiny_model("llama")
    model.model.layers[0].mlp.up_proj.weight.data *= 1.3
    exported = list(export_weights(model, QUADS))
    index = next(i for i, w in enumerate(exported) if w.name.endswith("layers.0.mlp.up_proj"))
    own = model.model.layers[0].mlp.gate_proj.weight.abs().amax() / 2688
    exported[index] = dataclasses.replace(exported[index], outer=own.detach())
    with pytest.raises(SyncError, match=r"layers\.0\.mlp\.up_proj"):
        verify_sync(model, QUADS, exported)


def test_only_nvfp4_weights_export() -> None:
    with pytest.raises(RecipeError, match="'rollout_weights' is 'fp8'"):
        list(export_weights(tiny_model(), recipes.named()["fp8"]))


def test_a_refit_writes_into_the_storage_that_is_there() -> None:
    model = tiny_model()
    held = {w.name: w for w in export_weights(model, QUADS)}
    addresses = [t.data_ptr() for w in held.values() for t in (w.packed, w.scales, w.outer)]
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(1.7)
    returned = list(export_weights(model, QUADS, into=held))
    assert [t.data_ptr() for w in returned for t in (w.packed, w.scales, w.outer)] == addresses
    assert verify_sync(model, QUADS, held.values()) == len(held)


def test_a_refit_with_nan_in_the_last_weight_writes_nothing() -> None:
    model = tiny_model()
    held = {w.name: w for w in export_weights(model, QUADS)}
    before = [t.clone() for w in held.values() for t in (w.packed, w.scales, w.outer)]
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj.mul_(1.7)
        model.model.layers[1].mlp.experts.down_proj[3, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj expert 3 holds NaN"):
        list(export_weights(model, QUADS, into=held))
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, (t for w in held.values() for t in (w.packed, w.scales, w.outer)), strict=True)
    )
