"""Kernel 2 equals the emulator's residual compensation byte for byte, in every scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quads.emulation import layout, quantizers, residual
from quads.kernels import compensate as kernel

Launch = Callable[..., Any]


def uneven(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows and blocks of different size, signed zeros, a zero row."""
    torch.manual_seed(seed)
    x = torch.randn(m, k) * torch.exp(torch.randn(m, 1)) * torch.exp(torch.randn(1, k // 16)).repeat_interleave(16, 1)
    x[:, 5] = -0.0
    x[m // 2] = 0
    return x.to(dtype)


def want(x: Tensor, q: quantizers.NVFP4Tensor, lists: Tensor, tile_rows: int) -> tuple[Tensor, Tensor]:
    """Packed codes and scales of the augmented operand; lists [tiles, S]."""
    packed, scales = [], []
    for tile, blocks in enumerate(lists):
        rows = slice(tile * tile_rows, min((tile + 1) * tile_rows, x.shape[0]))
        part = quantizers.NVFP4Tensor(q.codes[rows], q.scales[rows], q.outer[rows] if q.outer.ndim else q.outer)
        r = residual.quantize_residual(x[rows], part, blocks.long())
        packed.append(layout.pack(torch.cat([part.codes, r.codes], dim=-1)))
        scales.append(torch.cat([part.scales, r.scales], dim=-1))
    return torch.cat(packed), torch.cat(scales)


def selected(x: Tensor, q: quantizers.NVFP4Tensor, count: int, tile_rows: int) -> Tensor:
    """The emulator's lists, [tiles, count]."""
    r, lists = residual.residual(x, q), []
    for start in range(0, x.shape[0], tile_rows):
        rows = slice(start, start + tile_rows)
        scores = residual.block_scores(r[rows], q.outer[rows] if q.outer.ndim else q.outer)
        lists.append(residual.top_blocks(scores.sum(dim=0), count))
    return torch.stack(lists)


def check(got: kernel.RacOperand, x: Tensor, q: quantizers.NVFP4Tensor, lists: Tensor, tile_rows: int) -> None:
    assert torch.equal(got.blocks.view(lists.shape).long(), lists.long()), (got.blocks, lists)
    packed, scales = want(x, q, lists, tile_rows)
    assert torch.equal(got.scales, scales), f"{(got.scales != scales).sum()} of {scales.numel()} scales differ"
    assert torch.equal(got.packed, packed), f"{(got.packed != packed).sum()} of {packed.numel()} bytes differ"


@pytest.mark.parametrize(
    ("granularity", "dtype"),
    [("tensor", torch.bfloat16), ("token", torch.bfloat16), ("tensor", torch.float16), ("token", torch.float32)],
)
@pytest.mark.parametrize(("scope", "tile_rows"), [("batch", 6), ("tile", 4), ("token", 1)])
def test_selected_scopes_equal_the_emulator(
    launch: Launch, scope: kernel.Scope, tile_rows: int, granularity: str, dtype: torch.dtype
) -> None:
    x = uneven(6, 176, dtype)
    q = quantizers.quantize(x, granularity=granularity)
    got = launch(kernel.quantize_rac, x, 5, scope, q.outer, granularity=granularity, tile_rows=tile_rows)
    check(got, x, q, selected(x, q, 5, tile_rows), tile_rows)


@pytest.mark.parametrize("granularity", ["tensor", "token"])
@pytest.mark.parametrize("scope", ["static", "random", "all"])
def test_known_lists_equal_the_emulator(launch: Launch, scope: kernel.Scope, granularity: str) -> None:
    x = uneven(9, 1152, torch.bfloat16)
    count = 72 if scope == "all" else 35
    lists = {
        "static": torch.arange(1, 71, 2),
        "random": torch.randperm(72, generator=torch.Generator().manual_seed(3))[:35].sort().values,
        "all": torch.arange(72),
    }[scope]
    static = lists.int() if scope == "static" else None
    got = launch(kernel.quantize_rac, x, count, scope, granularity=granularity, static_blocks=static, seed=3)
    check(got, x, quantizers.quantize(x, granularity=granularity), lists[None], 9)


@pytest.mark.parametrize("size", [1.0, 2.0**-100, 2.0**60])
def test_a_known_list_takes_given_outer_scales_or_finds_them_in_the_same_launch(launch: Launch, size: float) -> None:
    """Rows far outside of the fast range and a row of zeros among them."""
    x = uneven(5, 176, torch.bfloat16) * size
    x[2] = 0
    q, listed = quantizers.quantize(x, granularity="token"), torch.tensor([0, 3, 7, 10], dtype=torch.int32)
    shared = {"granularity": "token", "static_blocks": listed}
    check(launch(kernel.quantize_rac, x, 4, "static", **shared), x, q, listed.long()[None], 5)
    known = launch(kernel.quantize_rac, x, 4, "static", static_ranks=kernel.ranks(listed, 11), **shared)
    given = launch(kernel.quantize_rac, x, 4, "static", q.outer, **shared)
    for field in ("packed", "scales", "outer"):
        assert torch.equal(getattr(known, field), getattr(given, field)), field


@pytest.mark.parametrize("scope", ["batch", "tile", "token"])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 3e38])
def test_garbage_in_padding_rows_gives_valid_lists_and_leaves_the_other_rows_their_codes(
    launch: Launch, garbage: float, scope: kernel.Scope
) -> None:
    """A CUDA graph pads a batch with whatever lay in memory; a list is an index into memory."""
    x = uneven(6, 176, torch.bfloat16)
    x[3], x[5, ::3] = garbage, garbage
    got = launch(kernel.quantize_rac, x, 5, scope, granularity="token", tile_rows=4)
    lists = got.blocks.reshape(-1, 5)
    assert bool(((lists >= 0) & (lists < 11)).all())
    assert bool((lists.diff(dim=1) > 0).all())
    rows = [0, 1, 2, 4]
    q = quantizers.quantize(x[rows], granularity="token")
    assert torch.equal(got.packed[rows, :88], q.packed)
    assert torch.equal(got.scales[rows, :11], q.scales)


def test_equal_scores_go_to_the_lower_block(launch: Launch) -> None:
    x = uneven(4, 16, torch.bfloat16).repeat(1, 8)
    for scope in ("batch", "token"):
        got = launch(kernel.quantize_rac, x, 3, scope)
        assert (got.blocks == torch.arange(3)).all()


@pytest.mark.parametrize("scope", ["batch", "tile", "token", "static", "random"])
def test_ratio_zero_is_naive_w4a4(launch: Launch, scope: kernel.Scope) -> None:
    x = uneven(5, 48, torch.bfloat16)
    static = torch.empty(0, dtype=torch.int32) if scope == "static" else None
    got = launch(kernel.quantize_rac, x, 0, scope, static_blocks=static)
    q = quantizers.quantize(x)
    assert torch.equal(got.packed, q.packed) and torch.equal(got.scales, q.scales)


@pytest.mark.parametrize("scope", ["batch", "token", "all"])
def test_ratio_one_is_two_pass_nvfp4(launch: Launch, scope: kernel.Scope) -> None:
    x = uneven(5, 48, torch.bfloat16)
    got = launch(kernel.quantize_rac, x, 3, scope)
    q = quantizers.quantize(x)
    second = quantizers.quantize(residual.residual(x, q), q.outer)
    assert torch.equal(got.packed, torch.cat([q.packed, second.packed], -1))
    assert torch.equal(got.scales, torch.cat([q.scales, second.scales], -1))


@pytest.mark.parametrize("exponent", [-60, -20, 64])
def test_outer_scales_outside_the_fast_range(launch: Launch, exponent: int) -> None:
    x = torch.ldexp(uneven(3, 64, torch.float32), torch.tensor(exponent))
    q = quantizers.quantize(x, granularity="token")
    for scope, tile_rows in (("batch", 3), ("token", 1)):
        got = launch(kernel.quantize_rac, x, 2, scope, granularity="token")
        check(got, x, q, selected(x, q, 2, tile_rows), tile_rows)


@pytest.mark.parametrize("scope", ["batch", "token", "tile", "random"])
def test_no_rows(launch: Launch, scope: kernel.Scope) -> None:
    got = launch(kernel.quantize_rac, torch.empty(0, 64), 2, scope)
    assert (got.packed.shape, got.scales.shape) == ((0, 48), (0, 6))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"blocks": 5}, r"blocks = 5: K holds 4 blocks of 16"),
        ({"blocks": 2, "scope": "all"}, r"scope 'all' compensates all 4"),
        ({"blocks": 2, "scope": "static"}, r"static_blocks goes with scope 'static'"),
        ({"blocks": 2, "scope": "column"}, r"scope 'column' is unknown"),
        ({"blocks": 1, "scope": "static", "static_blocks": torch.zeros(1)}, r"static_blocks is torch.float32"),
        ({"blocks": 1, "scope": "tile", "tile_rows": 0}, r"tile_rows = 0"),
    ],
)
def test_bad_input_is_refused_in_one_line(launch: Launch, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch(kernel.quantize_rac, torch.ones(2, 64), **kwargs)
