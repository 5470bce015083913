"""Rollouts: what fits, what grows with what, and the first measurements on the H200."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from quads.bench import rollout_model
from quads.bench.model_error import anchors
from quads.bench.results import Result
from quads.bench.rollout_model import Load, arms, fits, models, predicted, tokens_per_s
from quads.bench.specs import chip

H200, B200 = chip("H200"), chip("B200")
PAGE = Path(__file__).parents[2] / "docs" / "bench-model.md"
QWEN = models()["qwen3-30b-a3b"]


def parameters(name: str) -> tuple[float, float]:
    """Total and active, in billions, embeddings included."""
    model = models()[name]
    attention = sum(n * k for n, k in model.projections()) * model.layers
    expert, ends = 3 * model.inner * model.hidden * model.layers, 2 * model.vocabulary * model.hidden
    return (attention + model.experts * expert + ends) / 1e9, (attention + model.top_k * expert + ends) / 1e9


def test_the_models_have_the_sizes_of_their_names() -> None:
    assert parameters("qwen3-30b-a3b") == pytest.approx((30.5, 3.3), rel=0.03)
    assert parameters("25b-a2.8b-like") == pytest.approx((25.0, 2.8), rel=0.05)


def test_larger_batches_give_more_tokens_a_second_and_each_sequence_fewer() -> None:
    speeds = [tokens_per_s(QWEN, arms()["bf16"], Load(batch=b), B200) for b in (1, 32, 256)]
    assert speeds == sorted(speeds)
    assert speeds[0] > speeds[2] / 256


@pytest.mark.parametrize("arm", arms())
def test_the_host_only_costs(arm: str) -> None:
    load = Load(batch=128)
    assert tokens_per_s(QWEN, arms()[arm], load, B200) < tokens_per_s(QWEN, arms()[arm], load, B200, host=False)


def test_four_bits_fit_where_sixteen_do_not() -> None:
    card = chip("RTX-5090")
    assert not fits(QWEN, arms()["bf16"], Load(batch=1), card)
    assert fits(QWEN, arms()["nvfp4"], Load(batch=1), card)
    shown = {one.numerics for one in rollout_model.predictions(("RTX-5090",)) if one.way == QWEN.name}
    assert "bf16" not in shown and "nvfp4" in shown


def test_weights_weigh_what_their_format_says() -> None:
    sixteen, four = (QWEN.weight_bytes(arms()[name]) for name in ("bf16", "nvfp4"))
    assert sixteen == pytest.approx(61e9, rel=0.01)
    experts = 3 * QWEN.experts * QWEN.inner * QWEN.hidden * QWEN.layers
    assert sixteen - four == pytest.approx(experts * (2 - 0.5625))


def test_compensation_costs_and_a_list_of_the_batch_costs_more() -> None:
    naive, static, batch = (
        tokens_per_s(QWEN, arms()[name], Load(batch=32), B200, host=False)
        for name in ("nvfp4", "quads-static", "quads-batch")
    )
    assert naive > static > batch


def test_the_first_look_on_the_h200_is_met_for_bf16_and_bounded_for_its_peers() -> None:
    ratios: dict[str, list[float]] = {}
    for one in anchors()[1]:
        if one.op == "rollout":
            expected = predicted(one, H200)
            assert expected is not None
            ratios.setdefault(one.numerics, []).append(one.seconds / expected)
    assert all(0.8 < ratio < 1.25 for ratio in ratios["bf16"])
    assert all(ratio > 0.5 for found in ratios.values() for ratio in found)


def test_the_published_ratios_are_the_models() -> None:
    rows = {
        cells[0].strip(): [float(cell) for cell in cells[1:]]
        for line in PAGE.read_text().splitlines()
        if len(cells := line.strip("| ").split("|")) == 6 and cells[1].strip()[:1].isdigit() and "batch" not in line
    }
    arm_of = {"W4A4": "nvfp4", "W4A4 + RAC 50 %, static list": "quads-static", "bf16": "bf16"}
    for name, arm in arm_of.items():
        loads = [Load(batch=batch) for batch in (1, 32, 128, 256, 512)]
        speeds = [[tokens_per_s(QWEN, arms()[key], load, B200, host=False) for load in loads] for key in (arm, "fp8")]
        assert rows[name] == [round(a / b, 2) for a, b in zip(*speeds, strict=True)], name


def test_a_measured_rollout_of_an_unknown_model_is_not_predicted() -> None:
    shape = rollout_model.shape(dataclasses.replace(QWEN, hidden=1), Load(batch=1))
    assert (
        predicted(Result(op="rollout", numerics="bf16", implementation="vllm", shape=shape, seconds=1.0), H200) is None
    )


def test_measured_layers_are_those_of_the_result() -> None:
    def expected(layers: int) -> float:
        shape = rollout_model.shape(dataclasses.replace(QWEN, layers=layers), Load(batch=32))
        found = predicted(Result(op="rollout", numerics="bf16", implementation="vllm", shape=shape, seconds=1.0), H200)
        assert found is not None
        return found

    assert expected(48) > 3 * expected(8)
