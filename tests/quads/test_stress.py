"""Outlier stress: the BF16 function keeps its bits, while the quantiser sees outliers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quads.attribution import Plan, TokenBatch, diagnose_tokens
from quads.attribution.variants import WEIGHTS
from quads.stress import Stress, add_outliers
from tests.quads.tiny import tiny_model, tokens

FAMILIES = ("llama", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "olmoe")


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_function_is_bit_identical(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=dtype)
    before = logits(model)
    names = {name: value.clone() for name, value in model.state_dict().items()}
    add_outliers(model, Stress(channels=3))
    assert torch.equal(logits(model), before)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, names[name])}
    assert any("layernorm" in name for name in changed) and any("proj" in name for name in changed)


def test_a_scale_that_is_no_power_of_two_would_change_bits() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    before = logits(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[5] *= 3
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).weight[:, 5] /= 3
    assert not torch.equal(logits(model), before)


@given(st.integers(1, 4), st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(0, 1000))
def test_every_outlier_has_a_block_of_its_own(channels: int, exponents: list[int], seed: int) -> None:
    scales = Stress(channels=channels, exponents=tuple(exponents), seed=seed).scales(64)
    assert int((scales > 1).sum()) == channels
    assert int((scales.reshape(4, 16) > 1).any(1).sum()) == channels
    assert set(scales[scales > 1].tolist()) <= {2.0**e for e in exponents}


def test_outliers_raise_activation_error_and_favour_chosen_channels() -> None:
    real = torch.ones(4, 12, dtype=torch.bool)
    batch = TokenBatch(tokens(4, 12), real, real[:, 1:])
    plan = Plan(ratios=(0.25,), scopes=("batch", "random"), seeds=(0,), isolate=False)
    results = []
    for stressed in (False, True):
        model = tiny_model("llama")
        if stressed:
            add_outliers(model, Stress(channels=1, exponents=(5,)))
        rows = diagnose_tokens(model, batch, plan=plan).sites
        first = next(row for row in rows if row["projection"] == "q_proj" and row["layer"] == 0)
        results.append({name: first[f"{name}/{WEIGHTS}"] for name in ("both", "rac-25", "random-25-s0")})
    plain, stress = results
    assert stress["both"] > 1.5 * plain["both"]
    assert stress["rac-25"] < 0.6 * stress["both"] and plain["rac-25"] > 0.7 * plain["both"]


def test_a_norm_that_adds_one_to_its_weight_is_refused() -> None:
    model = tiny_model("llama")
    norm = model.model.layers[1].input_layernorm
    plain = type(norm).forward
    norm.forward = lambda x: plain(norm, x) * (1 + norm.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="layer 1 input_layernorm: LlamaRMSNorm does not multiply by its weight"):
        add_outliers(model, Stress(channels=2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_family_with_other_readers_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"layer 0 self_attn\.q_a_proj\.weight: not known"):
        add_outliers(tiny_model("deepseek_v3"), Stress(channels=2))


def test_a_lossy_scale_is_refused_and_nothing_changes() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="cannot be scaled by a power of two without loss"):
        add_outliers(model, Stress(channels=2, exponents=(127,)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("channels", [0, 5])
def test_more_outliers_than_blocks_are_refused(channels: int) -> None:
    with pytest.raises(ValueError, match=f"channels is {channels}"):
        Stress(channels=channels).scales(64)
