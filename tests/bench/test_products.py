"""What our products cost: the kernels' own ways and plans, and steps, bytes and FLOPs that can be counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quads.bench import compiled, counts, layers, products
from quads.bench.products import Product, Routing
from quads.bench.specs import chip
from quads.bench.work import Work
from quads.kernels import moe
from quads.kernels.gemm_details import prefill

H200, B200 = chip("H200"), chip("B200")


def routing(tokens: int) -> Routing:
    return Routing(tokens=tokens, experts=128, top_k=8)


def w13(ratio: float = 0.0) -> Product:
    return Product(n=1536, k=2048, extra=int(2048 * ratio), moved=1e8, swiglu=True)


def w2(ratio: float = 0.0) -> Product:
    return Product(n=2048, k=768, extra=int(768 * ratio), moved=1e8)


def prompt() -> Routing:
    """Rows from which experts are decoded once."""
    return routing(prefill.CROSSOVER * 128 // 8)


def test_hopper_decodes_and_blackwell_multiplies_fp4() -> None:
    [hopper] = layers.dense(16, 8192, 8192, "nvfp4", H200)
    [blackwell] = layers.dense(16, 8192, 8192, "nvfp4", B200)
    assert (hopper.numerics, blackwell.numerics) == ("bf16", "nvfp4")
    assert hopper.instructions > 3 * blackwell.instructions


def test_many_tokens_on_hopper_are_expanded_first() -> None:
    works = layers.dense(8192, 8192, 8192, "nvfp4", H200)
    assert [work.flops > 0 for work in works] == [False, False, True]


def test_the_triton_product_pays_for_whole_tiles() -> None:
    one, many = (layers.dense(m, 8192, 8192, "nvfp4", B200)[0].flops for m in (1, 32))
    assert one == many == 2.0 * 32 * 8192 * 8192


def test_rac_reads_no_more_weight_but_multiplies_more() -> None:
    [plain], [rac] = (layers.dense(16, 8192, 8192, "nvfp4", B200, ratio=r) for r in (0.0, 0.5))
    assert rac.flops == pytest.approx(1.5 * plain.flops)
    assert rac.bytes - plain.bytes == pytest.approx(16 * 4096 * counts.NVFP4)


def test_blocks_of_experts_cover_every_pair() -> None:
    blocks = routing(64).blocks(8)
    assert 8 * blocks >= 64 * 8
    assert blocks == pytest.approx(128, rel=0.15)  # four rows an expert: one block nearly everywhere


@pytest.mark.parametrize("tokens", [1, 8, 64, 256, 1024, 4096])
def test_routed_rows_take_the_way_and_width_that_the_layer_takes(tokens: int) -> None:
    weight = compiled.shape_of(128, 1536, 2048)
    found = products._routed_way(routing(tokens), w13())
    assert found == (moe.choose(tokens * 8, weight), moe.slot_width(tokens * 8, weight))


def test_every_plan_of_the_layer_was_compiled() -> None:
    for k in (768, 2048):
        for pairs in (1, 1000, 2000, 2500, 5000):
            width = moe.slot_width(pairs, compiled.shape_of(128, 1536, k))
            warps = moe.rows_plan(width, k).row_warps
            for residual in (False, True):
                row = compiled.product("grouped", "sm_90a", width, residual=residual, grouped=True, warps=warps)
                assert (row["tokens"], row["rows"]) == (width, 64 * warps)


def test_warps_that_share_activations_issue_a_step_for_each_chunk_of_their_rows() -> None:
    [work] = products.routed(routing(128), 128, w13(), H200)
    row = compiled.product("grouped", "sm_90a", 16, residual=False, grouped=True, warps=8)
    chunks = routing(128).blocks(16) * (1536 // 64) * (2048 // 64)
    assert work.instructions == pytest.approx(chunks * row["instructions_a_step"])
    assert work.bytes == w13().moved


@pytest.mark.parametrize("product", [w13, w2])
def test_of_rac_s_chunks_the_repeated_share_takes_the_longer_step(product: Callable[[float], Product]) -> None:
    def instructions(ratio: float) -> float:
        [work] = products.routed(routing(128), 1024, product(ratio), H200)
        return work.instructions

    quarter, half, whole = map(instructions, (0.25, 0.5, 1.0))
    warps = moe.rows_plan(16, product(0.0).k).row_warps
    row = compiled.product("grouped", "sm_90a", 16, residual=True, grouped=True, warps=warps)
    assert whole / half == pytest.approx(2 * row["repeated"] / (row["repeated"] + row["instructions_a_step"]))
    assert whole - half == pytest.approx(2 * (half - quarter))


def test_a_prompt_decodes_each_expert_once_and_multiplies_whole_half_blocks_of_rows() -> None:
    some = prompt()
    x, w, product = products.routed(some, some.tokens, w13(), H200)
    slots = some.blocks(prefill.ROWS) * prefill.ROWS
    assert some.pairs < slots < some.pairs + 128 * prefill.ROWS
    assert w.bytes == pytest.approx(some.used * 1536 * 2048 * (counts.NVFP4 + 2))
    assert x.bytes == pytest.approx(some.tokens * 2048 * counts.NVFP4 + slots * 2048 * 2)
    multiplied = some.blocks(64) * 64
    assert some.pairs < multiplied < slots
    assert product.flops == pytest.approx(2 * multiplied * 1536 * 2048)
    assert product.bytes == pytest.approx(2 * (slots * 2048 + some.used * 1536 * 2048 + some.pairs * 768))


def test_a_prompt_s_repeated_columns_are_written_and_multiplied_again() -> None:
    plain, rac = (products.routed(prompt(), 1, w2(ratio), H200) for ratio in (0.0, 0.5))
    assert rac[2].flops == pytest.approx(1.5 * plain[2].flops)
    assert rac[1].bytes - plain[1].bytes == pytest.approx(prompt().used * 2048 * 384 * 2)


def test_only_a_prompt_on_hopper_goes_through_memory() -> None:
    assert products.goes_through_memory(prompt(), w2(), H200)
    assert not products.goes_through_memory(prompt(), w2(), B200)
    assert not products.goes_through_memory(routing(64), w2(), H200)


def test_sharing_activations_issues_fewer_instructions_than_decoding_them_in_each_warp() -> None:
    def apart(ratio: float) -> Work:
        return products._decoded("decode", [(16, routing(128).blocks(16))], w13(ratio), grouped=True)

    for ratio in (0.0, 0.5):
        [shared] = products.routed(routing(128), 128, w13(ratio), H200)
        assert shared.instructions < 0.8 * apart(ratio).instructions
