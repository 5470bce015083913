"""What layers cost on a chip: counted by hand where that is possible, ordered where it is not."""

from __future__ import annotations

import pytest

from quads.bench import layers
from quads.bench.specs import chip
from quads.bench.work import seconds

H200, B200 = chip("H200"), chip("B200")
MOE = {"hidden": 2048, "inner": 768, "experts": 128, "top_k": 8}


def test_a_peers_product_moves_its_operands_once() -> None:
    [work] = layers.dense(16, 8192, 4096, "bf16", H200, ours=False)
    assert work.bytes == 2 * (16 * 4096 + 8192 * 4096 + 16 * 8192)
    assert work.flops == 2 * 16 * 8192 * 4096


def test_a_batch_touches_the_experts_that_even_routing_gives() -> None:
    one, all_of_them = (layers.moe(tokens, **MOE, numerics="bf16", chip=H200, ours=False) for tokens in (1, 4096))
    expert = 3 * 2.0 * 768 * 2048
    assert one[0].bytes == pytest.approx(8 * expert, rel=0.01)
    assert all_of_them[0].bytes == pytest.approx(128 * expert + 4096 * 2048 * 4)


def test_compensation_costs_and_a_list_of_the_batch_costs_launches() -> None:
    def time(scope: str, ratio: float) -> float:
        return seconds(layers.moe(1, **MOE, numerics="nvfp4", chip=B200, scope=scope, ratio=ratio), B200)

    assert time("plain", 0.0) < time("static", 0.5) < time("batch", 0.5)


def test_a_known_list_at_few_rows_takes_one_launch() -> None:
    few, many = (layers.compensated(rows, 2048, "static", 0.5, B200) for rows in (1024, 1025))
    assert sum(work.launches for work in few) == 1
    assert sum(work.launches for work in many) == 4


def test_the_quantisers_known_time_on_the_h200_is_met() -> None:
    """212.9 us for 32768 x 8192, docs/results/kernels-h200/quantize.md."""
    assert seconds(layers.quantised(32768 * 8192, "tensor", H200), H200) == pytest.approx(212.9e-6, rel=0.1)
