"""A prepared model saves and loads under its ordinary names, and hands masters or packed weights to a rollout."""

import pytest
import torch

from quads import recipes
from quads.integrations.workers import packed_for_rollout, prepare_actor, weights_for_rollout
from quads.qat import prepare_qat
from quads.state import load_master_state, master_name, master_state
from tests.quads.tiny import tiny_model, tokens

QUADS = recipes.named()["quads"]


def test_names_lose_the_parametrisation_and_nothing_else() -> None:
    assert master_name("a.parametrizations.weight.original") == "a.weight"
    assert master_name("a.parametrizations.down_proj.original") == "a.down_proj"
    assert master_name("a.weight") == "a.weight"


def test_a_prepared_model_has_the_state_of_the_plain_one_and_loads_it_back() -> None:
    plain, prepared, other = tiny_model(), tiny_model(), tiny_model(seed=7)
    prepare_qat(prepared, QUADS)
    prepare_qat(other, QUADS)
    state = dict(master_state(prepared))
    assert list(state) == list(plain.state_dict())
    load_master_state(other, state)
    assert torch.equal(other(tokens()).logits, prepared(tokens()).logits)
    with pytest.raises(ValueError, match=r"checkpoint lacks lm_head\.weight"):
        load_master_state(other, {k: v for k, v in state.items() if k != "lm_head.weight"})
    with pytest.raises(ValueError, match="checkpoint holds extra, which the model has not"):
        load_master_state(other, {**state, "extra": torch.zeros(1)})


def test_a_worker_prepares_an_actor_and_streams_masters_or_packed_weights() -> None:
    actor, plain = tiny_model(), tiny_model()
    assert len(prepare_actor(actor, "quads")) == 4
    masters = dict(weights_for_rollout(actor))
    assert all(torch.equal(masters[name], tensor) for name, tensor in plain.state_dict().items())
    packed = dict(packed_for_rollout(actor, "quads"))
    expert = "model.layers.0.mlp.experts.2.up_proj"
    assert packed[f"{expert}.weight"].dtype == torch.uint8 and f"{expert}.weight_scale_2" in packed
    assert torch.equal(packed["lm_head.weight"], plain.lm_head.weight)
    assert not any("parametrizations" in name or "gate_up_proj" in name for name in packed)
