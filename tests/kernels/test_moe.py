"""The routed layer equals the same steps through the emulator, bit for bit, on the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quads.emulation import gemm as emulator
from quads.emulation import residual
from quads.emulation.quantizers import NVFP4Tensor, quantize
from quads.kernels import compensate
from quads.kernels import gemm as dense
from quads.kernels import moe as kernel
from quads.kernels.gemm_details import grouped as grouped_rows
from quads.kernels.gemm_details import hopper, prefill
from quads.kernels.moe_details import routing
from quads.kernels.prepack import HopperWeight, prepare_native
from quads.kernels.quantize import PackedNVFP4

Launch = Callable[..., Any]
EXPERTS, HIDDEN, INNER, TOP_K = 5, 64, 32, 2


def experts_weight(n: int, k: int, seed: int) -> NVFP4Tensor:
    generator = torch.Generator().manual_seed(seed)
    parts = [quantize(torch.randn(n, k, generator=generator) * (e + 1)) for e in range(EXPERTS)]
    return NVFP4Tensor(*(torch.stack([getattr(q, f) for q in parts]) for f in ("codes", "scales", "outer")))


def packed(q: NVFP4Tensor) -> PackedNVFP4:
    return PackedNVFP4(q.packed, q.scales, q.outer)


def layer(
    x: Tensor, ids: Tensor, weights: Tensor, w13: PackedNVFP4, w2: PackedNVFP4, rac: bool = False, **options: Any
) -> Tensor:
    """`moe` on freshly prepared weights; with `rac`, half of the blocks are compensated in both products."""
    quantizer = compensated if rac else kernel.quantize_rows
    prepared = dense.prepare_weight(w13, interleave=True), dense.prepare_weight(w2)
    return kernel.moe(x, ids, weights, *prepared, quantize_x=quantizer, quantize_h=quantizer, **options)


def chosen(k: int) -> Tensor:
    return torch.arange(0, k // 16, 2, dtype=torch.int32)


def compensated(x: Tensor) -> tuple[PackedNVFP4, Tensor]:
    q = quantize(x.cpu(), granularity="token")
    blocks = chosen(x.shape[1])
    full = emulator.concat_k(q, residual.quantize_residual(x.cpu(), q, blocks.long()))
    return PackedNVFP4(*(t.to(x.device) for t in (full.packed, full.scales, full.outer))), blocks.to(x.device)


def linear(x: Tensor, w: NVFP4Tensor, e: int, outer: Tensor, rac: bool) -> Tensor:
    a, we = quantize(x, granularity="token"), NVFP4Tensor(w.codes[e], w.scales[e], w.outer[e])
    if rac:
        blocks = chosen(x.shape[1]).long()
        a = emulator.concat_k(a, residual.quantize_residual(x, a, blocks))
        we = emulator.concat_k(we, emulator.select_blocks(we, blocks))
    return emulator.epilogue(emulator.matmul(a, we), a.outer * outer)


def expected(x: Tensor, ids: Tensor, weights: Tensor, w13: NVFP4Tensor, w2: NVFP4Tensor, rac: bool = False) -> Tensor:
    outer13 = w13.outer.reshape(EXPERTS, -1).expand(EXPERTS, 2)
    out = torch.zeros(x.shape[0], w2.codes.shape[1])
    for token in range(x.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[token, k])
            if e < 0:
                continue
            alphas = outer13[e].repeat_interleave(INNER)
            gate, up = linear(x[token : token + 1], w13, e, alphas, rac).float().chunk(2, -1)
            h = (gate / (1 + torch.exp(-gate)) * up).to(torch.bfloat16)
            out[token] += weights[token, k] * linear(h, w2, e, w2.outer[e], rac).float()[0]
    return out.to(torch.bfloat16)


def inputs(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(tokens, EXPERTS - 1, generator=generator).argsort(dim=1)[:, :TOP_K]
    return x, ids, torch.rand(tokens, TOP_K, generator=generator)


@pytest.mark.parametrize("rac", [False, True])
@pytest.mark.parametrize("tokens", [1, 7])
def test_layer_equals_the_emulator_with_an_empty_expert(launch: Launch, tokens: int, rac: bool) -> None:
    x, ids, weights = inputs(tokens)
    w13, w2 = experts_weight(2 * INNER, HIDDEN, 1), experts_weight(HIDDEN, INNER, 2)
    got = launch(layer, x, ids, weights, packed(w13), packed(w2), rac=rac)
    assert torch.equal(got, expected(x, ids, weights, w13, w2, rac))


@pytest.mark.gpu
@pytest.mark.parametrize("rac", [False, True])
def test_planned_for_a_fixed_number_of_rows_a_token_has_the_bits_it_has_alone(rac: bool) -> None:
    """With the plan that fits each number of rows, the order of sums changes and the last bits with it."""
    experts, hidden, inner, tokens = 128, 2048, 768, 130
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, device="cuda").bfloat16()  # noqa: E731
    weights = (
        dense.prepare_weight(random_weight(experts, 2 * inner, hidden), interleave=True),
        dense.prepare_weight(random_weight(experts, hidden, inner)),
    )
    x, ids = draw(tokens, hidden), torch.rand(tokens, experts, generator=generator, device="cuda").argsort(1)[:, :8]
    shares = torch.rand(tokens, 8, generator=generator, device="cuda")
    quantizer = half_listed if rac else kernel.quantize_rows
    run = lambda rows, plan: kernel.moe(  # noqa: E731
        x[rows], ids[rows], shares[rows], *weights, quantize_x=quantizer, quantize_h=quantizer, plan_for=plan
    )
    together = run(slice(0, tokens), 2048)
    alone = torch.cat([run(slice(i, i + 1), 2048) for i in range(0, tokens, 13)])
    assert torch.equal(alone, together[::13])
    assert torch.allclose(
        run(slice(0, tokens), None).float(), together.float(), rtol=2**-6, atol=float(together.abs().max()) * 2**-7
    )


def random_weight(experts: int, n: int, k: int) -> PackedNVFP4:
    codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x30, 0x50, (experts, n, k // 16), dtype=torch.uint8, device="cuda")
    return PackedNVFP4(codes, scales, torch.full((experts,), 1e-3, device="cuda"))


def half_listed(x: Tensor) -> tuple[Any, Tensor]:
    blocks = chosen(x.shape[1]).cuda()
    return compensate.quantize_rac(x, len(blocks), "static", granularity="token", static_blocks=blocks), blocks


def test_a_plan_for_more_rows_gives_the_same_layer(launch: Launch) -> None:
    x, ids, weights = inputs(3)
    w13, w2 = experts_weight(2 * INNER, HIDDEN, 1), experts_weight(HIDDEN, INNER, 2)
    assert torch.equal(
        launch(layer, x, ids, weights, packed(w13), packed(w2), plan_for=64), expected(x, ids, weights, w13, w2)
    )


def test_gate_and_up_may_have_different_outer_scales(launch: Launch) -> None:
    x, ids, weights = inputs(3)
    w13, w2 = experts_weight(2 * INNER, HIDDEN, 1), experts_weight(HIDDEN, INNER, 2)
    pairs = torch.stack([w13.outer, w13.outer * 1.2545], dim=1)
    w13 = NVFP4Tensor(w13.codes, w13.scales, pairs)
    got = launch(layer, x, ids, weights, packed(w13), packed(w2))
    assert torch.equal(got, expected(x, ids, weights, w13, w2))


def test_a_pair_without_an_expert_adds_nothing(launch: Launch) -> None:
    x, ids, weights = inputs(4)
    ids[1, 0], ids[2] = -1, -1
    w13, w2 = experts_weight(2 * INNER, HIDDEN, 1), experts_weight(HIDDEN, INNER, 2)
    got = launch(layer, x, ids, weights, packed(w13), packed(w2))
    assert torch.equal(got, expected(x, ids, weights, w13, w2))
    assert (got[2] == 0).all()


def test_no_tokens_give_an_empty_result(launch: Launch) -> None:
    x, ids, weights = inputs(0)
    w13, w2 = experts_weight(2 * INNER, HIDDEN, 1), experts_weight(HIDDEN, INNER, 2)
    assert launch(layer, x, ids, weights, packed(w13), packed(w2)).shape == (0, HIDDEN)


def test_few_rows_split_k_more_share_activations_and_prompts_decode_once() -> None:
    shapes = (128, 24, 128, 512), (128, 24, 128, 64), (128,)
    weight = HopperWeight(*(torch.empty(shape, device="meta") for shape in shapes), 1536, 2048, False)
    assert [kernel.choose(pairs, weight) for pairs in (8, 512, 65536)] == ["decode", "grouped", "prefill"]
    assert kernel.choose(65536, prepare_native(packed(experts_weight(64, 32, 0)))) == "native"


@pytest.mark.parametrize("counts", [[0, 3, 17, 0, 8, 1, 0], [40, 0], [0, 0, 0, 1]])
def test_every_routed_pair_has_one_slot_in_a_block_of_its_expert(counts: list[int]) -> None:
    ids = torch.tensor([e for e, n in enumerate(counts) for _ in range(n)], dtype=torch.int32)
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))].reshape(-1, 1)
    grouping = routing.route(ids, len(counts), 8)
    slots = grouping.slots.reshape(-1, 8)
    owners = {int(p): int(e) for row, e in zip(slots, grouping.groups, strict=True) for p in row if p >= 0}
    assert owners == {p: int(e) for p, e in enumerate(ids.flatten())}
    assert int((grouping.groups >= 0).sum()) == sum(-(-n // 8) for n in counts)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(128, 2048, 768), (8, 256, 128), (64, 512, 1024)])
def test_every_product_that_a_load_may_ask_for_is_compiled_ahead(
    shape: tuple[int, int, int], residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, hidden, inner = shape
    ahead: set[Any] = set()
    for module, name in ((grouped_rows, "grouped_kernel"), (hopper, "decode_kernel")):
        monkeypatch.setattr(module, name, lambda *key: ahead.add(key))
    w13, w2 = (
        HopperWeight(torch.empty(experts, n // 64, k // 16, 0), torch.empty(0), torch.empty(0), n, k, gated)
        for n, k, gated in ((2 * inner, hidden, True), (hidden, inner, False))
    )
    kernel.compile_ahead(w13, w2, residual=residual)
    compiled = ahead.copy()
    for weight, gated in ((w13, True), (w2, False)):
        for pairs in range(1, prefill.CROSSOVER * experts, max(1, experts // 7)):
            kernel._load(pairs, weight, residual, gated)
    assert ahead == compiled and len(compiled) >= 8
    assert not any(prefill.takes(prefill.CROSSOVER * experts - 1, w) for w in (w13, w2))


def test_weights_that_do_not_fit_are_refused(launch: Launch) -> None:
    x, ids, weights = inputs(2)
    w13, w2 = experts_weight(2 * INNER, HIDDEN, 1), experts_weight(HIDDEN, 2 * INNER, 2)
    with pytest.raises(ValueError, match="do not fit"):
        launch(layer, x, ids, weights, packed(w13), packed(w2))
