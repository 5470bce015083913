"""Routing is recorded and replayed by the model's own code."""

import pytest
import torch

from quads.routing import record_routing, replay_routing, routers
from tests.quads.tiny import tiny_model, tokens

MOE = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss"]


@pytest.mark.parametrize("family", MOE)
def test_replaying_its_own_routing_changes_no_bit(family: str) -> None:
    model = tiny_model(family)
    with record_routing(model) as recorder:
        expected = model(tokens(2, 12)).logits
    routing = recorder.routing(batch=2)
    assert set(routing) == set(routers(model)) and all(r.shape == (2, 12, 2) for r in routing.values())
    with replay_routing(model, routing):
        assert torch.equal(model(tokens(2, 12)).logits, expected)
    assert torch.equal(model(tokens(2, 12)).logits, expected)


@pytest.mark.parametrize("family", MOE)
def test_another_routing_is_followed_and_still_trains_the_router(family: str) -> None:
    model = tiny_model(family)
    with record_routing(model) as recorder:
        before = model(tokens(2, 12)).logits
    routing = {name: (r + 1) % 4 for name, r in recorder.routing(batch=2).items()}
    with record_routing(model) as seen, replay_routing(model, routing):
        out = model(tokens(2, 12), labels=tokens(2, 12))
    assert not torch.equal(out.logits, before)
    assert all(torch.equal(seen.routing(2)[name], routing[name]) for name in routing)
    out.loss.backward()
    assert all(module.weight.grad.abs().sum() > 0 for module in routers(model).values())


def test_prefill_and_decode_calls_join_along_the_sequence() -> None:
    model = tiny_model()
    ids = tokens(2, 6)
    with record_routing(model) as whole, torch.no_grad():
        model(ids)
    with record_routing(model) as parts, torch.no_grad():
        cache = model(ids[:, :4], use_cache=True).past_key_values
        for t in (4, 5):
            model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
    assert all(torch.equal(whole.routing(2)[name], r) for name, r in parts.routing(2).items())


def test_a_dense_model_a_missing_router_and_a_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no router"), record_routing(tiny_model("llama")):
        pass
    model = tiny_model()
    with record_routing(model) as recorder:
        model(tokens(2, 12))
    routing = recorder.routing(2)
    with (
        pytest.raises(ValueError, match=r"no record of router model\.layers\.0\.mlp\.gate"),
        replay_routing(model, {k: v for k, v in routing.items() if "layers.0" not in k}),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"chose for \(10, 2\), the record is \(24, 2\)"),
        replay_routing(model, routing),
    ):
        model(tokens(2, 5))
