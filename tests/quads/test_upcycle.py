"""Upcycling: the mixture of experts is the dense model's function, up to the bound it states."""

import pytest
import torch

from quads.upcycle import upcycle
from tests.quads.tiny import tiny_model, tokens


def in_float64(moe):
    moe.set_experts_implementation("eager")  # grouped products have no float64
    return moe


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens(4, 12)).logits


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_a_block_is_the_mlp_up_to_the_stated_bound(top_k: int) -> None:
    dense = tiny_model("llama", dtype=torch.float64)
    block = in_float64(upcycle(dense, experts=4, top_k=top_k, seed=top_k)).model.layers[0].mlp
    x = torch.randn(4, 32, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(top_k))
    with torch.no_grad():
        y, found = dense.model.layers[0].mlp(x), block(x)
    # In float64 the roundoff u and the order of sums vanish beside k 2^-23, what the float32 softmax leaves.
    assert ((found - y).abs() <= (top_k * 2.0**-23 + 1e-12) * y.abs() + 1e-14).all()


def test_one_active_expert_is_the_dense_model_exactly() -> None:
    dense = tiny_model("llama", dtype=torch.float64)
    assert torch.allclose(logits(in_float64(upcycle(dense, experts=4, top_k=1))), logits(dense), atol=1e-12)


def test_noise_spreads_tokens_over_experts_and_the_dense_model_is_not_changed() -> None:
    dense = tiny_model("llama")
    before = {name: value.clone() for name, value in dense.state_dict().items()}
    moe = upcycle(dense, experts=4, top_k=2)
    seen: list[torch.Tensor] = []
    moe.model.layers[1].mlp.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    logits(moe)
    assert len(seen[0].unique()) == 4
    assert all(torch.equal(value, before[name]) for name, value in dense.state_dict().items())


def test_seeds_differ_in_the_router_only() -> None:
    dense = tiny_model("llama")
    a, b = (upcycle(dense, seed=seed).state_dict() for seed in (0, 1))
    assert {name for name in a if not torch.equal(a[name], b[name])} == {
        "model.layers.0.mlp.gate.weight",
        "model.layers.1.mlp.gate.weight",
    }


def test_what_is_no_llama_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot upcycle a 'qwen3'"):
        upcycle(tiny_model("qwen3"))
    with pytest.raises(ValueError, match="top_k is 5"):
        upcycle(tiny_model("llama"), experts=4, top_k=5)
