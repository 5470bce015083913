"""The mixture-of-experts layer against one-expert-at-a-time products, and its edge shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quads.emulation import gemm, moe
from quads.emulation.quantizers import NVFP4Tensor, quantize

HIDDEN, INNER = 64, 48


def experts(count: int, seed: int = 0) -> list[moe.Expert]:
    """Experts whose gate and up have outer scales that differ."""
    g = torch.Generator().manual_seed(seed)
    return [
        moe.Expert(
            quantize(torch.randn(INNER, HIDDEN, generator=g)),
            quantize(3.7 * torch.randn(INNER, HIDDEN, generator=g)),
            quantize(torch.randn(HIDDEN, INNER, generator=g)),
        )
        for _ in range(count)
    ]


def with_scales(weight: moe.Weight, scales: Tensor, outer: Tensor | None = None) -> NVFP4Tensor:
    assert isinstance(weight, NVFP4Tensor)
    return NVFP4Tensor(weight.codes, scales, weight.outer if outer is None else outer)


def scales_of(weight: moe.Weight) -> Tensor:
    assert isinstance(weight, NVFP4Tensor)
    return weight.scales


def prepared(e: moe.Expert) -> moe.Expert:
    return moe.Expert(*(gemm.prepare(with_scales(w, scales_of(w))) for w in (e.gate, e.up, e.down)))


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def reference(x: Tensor, ids: Tensor, weights: Tensor, mixture: list[moe.Expert], **rac: Tensor) -> Tensor:
    """Token by token, slot by slot; quantisation per token makes rows independent of their neighbours."""
    y = torch.zeros(len(x), HIDDEN)
    for t in range(len(x)):
        for slot in range(ids.shape[1]):
            e = mixture[int(ids[t, slot])]
            row = x[t : t + 1]
            gate, up = (gemm.linear(row, w, rac_blocks=rac.get("rac_in")) for w in (e.gate, e.up))
            down = gemm.linear(moe.swiglu(gate, up), e.down, rac_blocks=rac.get("rac_mid"))
            term = down.float()[0] * weights[t, slot]
            y[t] = term if slot == 0 else y[t] + term
    return y.bfloat16()


def test_sorted_pairs_of_ragged_and_empty_experts() -> None:
    counts = [0, 3, 128, 0, 129, 1, 0]
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)])
    shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))].unsqueeze(1)
    order = moe.sort_pairs(shuffled, 7)
    assert [0, *order.ends] == [0, 0, 3, 131, 131, 260, 261, 261]
    assert shuffled.flatten()[order.rows].tolist() == ids.tolist()
    for rows in order.groups():
        assert order.rows[rows].tolist() == sorted(order.rows[rows].tolist())


@pytest.mark.parametrize("ready", [False, True])
def test_the_layer_is_each_expert_on_its_own_tokens(ready: bool) -> None:
    mixture, x = experts(5), tokens(9)
    g = torch.Generator().manual_seed(2)
    ids, weights = torch.randint(0, 4, (9, 2), generator=g), torch.rand(9, 2, generator=g)
    expected = reference(x, ids, weights, mixture)
    if ready:
        mixture = [prepared(e) for e in mixture]
    assert torch.equal(moe.layer(x, ids, weights, mixture), expected)


def test_rac_is_taken_in_both_products_and_per_expert_indices_may_differ() -> None:
    mixture, x = experts(3), tokens(6)
    ids, weights = torch.tensor([[0], [1], [2], [0], [1], [2]]), torch.ones(6, 1)
    rac = {"rac_in": torch.tensor([1, 3]), "rac_mid": torch.tensor([0])}
    got = moe.layer(x, ids, weights, mixture, **rac)
    assert torch.equal(got, reference(x, ids, weights, mixture, **rac))
    assert not torch.equal(got, moe.layer(x, ids, weights, mixture))
    per_expert = moe.layer(x, ids, weights, mixture, rac_in=torch.tensor([[1, 3], [0, 2], [1, 3]]))
    shared = moe.layer(x, ids, weights, mixture, rac_in=torch.tensor([1, 3]))
    same = (per_expert == shared).all(dim=1).tolist()
    assert same == [True, False, True, True, False, True]


def test_gate_and_up_keep_their_own_outer_scales() -> None:
    """With gate's scale for both (the reported w13 fault) the up half would be wrong by the ratio of the scales."""
    (e,) = experts(1)
    assert isinstance(e.gate, NVFP4Tensor)
    wrong = moe.Expert(e.gate, with_scales(e.up, scales_of(e.up), e.gate.outer), e.down)
    x, ids, weights = tokens(4), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    assert not torch.equal(moe.layer(x, ids, weights, [e]), moe.layer(x, ids, weights, [wrong]))
    assert torch.equal(moe.layer(x, ids, weights, [e]), reference(x, ids, weights, [e]))


def test_swiglu_rounds_silu_to_fp32_and_the_product_to_bf16() -> None:
    gate = torch.tensor([0.0, -0.0, 1.0, -3.0, 100.0, -200.0, 88.0]).bfloat16()
    up = torch.full_like(gate, 1.0078125)
    wide = gate.double()
    exact = (wide * torch.sigmoid(wide)).float()
    assert torch.equal(moe.swiglu(gate, up), (exact * up.float()).bfloat16())
    assert moe.swiglu(gate, up).dtype == torch.bfloat16


def test_the_product_is_rounded_before_its_block_maximum() -> None:
    """silu(1) * 1 is no bf16 number: quantising the unrounded product would give another outer scale."""
    gate = up = torch.ones(1, 16).bfloat16()
    unrounded = (gate.float() * torch.sigmoid(gate.float())) * up.float()
    rounded = quantize(moe.swiglu(gate, up), granularity="token").outer
    assert not torch.equal(rounded, quantize(unrounded, granularity="token").outer)


def test_slots_are_added_in_ascending_order_in_fp32() -> None:
    rows = torch.tensor([[1.0], [2.0**25], [-(2.0**25)]])
    ids = torch.tensor([[2, 0, 1]])
    order = moe.sort_pairs(ids, 3)
    assert moe.combine(rows[order.rows], order, torch.ones(1, 3)).tolist() == [[0.0]]
    ids = torch.tensor([[0, 1, 2]])
    order = moe.sort_pairs(ids, 3)
    assert moe.combine(rows[[1, 2, 0]][order.rows], order, torch.ones(1, 3)).tolist() == [[1.0]]


def test_an_expert_without_tokens_leaves_no_trace() -> None:
    mixture, x = experts(4), tokens(3)
    ids, weights = torch.tensor([[1], [1], [3]]), torch.ones(3, 1)
    nan = with_scales(mixture[0].gate, scales_of(mixture[0].gate) | 0x7F)
    poisoned = [moe.Expert(nan, nan, mixture[0].down), *mixture[1:]]
    assert torch.equal(moe.layer(x, ids, weights, poisoned), moe.layer(x, ids, weights, mixture))


def test_a_nan_expert_pollutes_only_its_own_tokens() -> None:
    mixture, x = experts(2), tokens(4)
    scales = scales_of(mixture[0].down).clone()
    scales[5, 0] = 0x7F
    mixture[0] = moe.Expert(mixture[0].gate, mixture[0].up, with_scales(mixture[0].down, scales))
    y = moe.layer(x, torch.tensor([[0], [1], [0], [1]]), torch.ones(4, 1), mixture)
    assert y.isnan().sum(dim=1).tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("x", "ids", "slots", "count", "message"),
    [
        (tokens(2), [[0], [2]], 1, 2, "expert_ids range from 0 to 2: there are 2 experts"),
        (tokens(2), [[-1], [0]], 1, 2, "expert_ids range from -1 to 0: there are 2 experts"),
        (tokens(2), [0, 1], 1, 2, r"expert_ids of shape \(2,\): expected \[tokens, slots\]"),
        (tokens(2), [[0], [1]], 2, 2, r"expected \[T, H\], \[T, slots\] and \[T, slots\]"),
        (tokens(2), [[0], [1]], 1, 0, "a mixture of 0 experts: expected at least one"),
        (tokens(2)[:0], torch.zeros(0, 1, dtype=torch.int64), 1, 2, r"shape \(0, 64\) is empty"),
        (tokens(2) * torch.inf, [[0], [1]], 1, 2, "holds NaN or Inf"),
    ],
)
def test_bad_input_is_named_with_its_rule(
    x: Tensor, ids: list[list[int]] | Tensor, slots: int, count: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        moe.layer(x, torch.as_tensor(ids), torch.ones(len(x), slots), experts(count))
