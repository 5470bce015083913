"""The measured reciprocal and its neighbours."""

from __future__ import annotations

import hashlib

import torch

from quads.emulation.reciprocal import NAMED, Reciprocal, approximate, corners, nudge, ulp_table


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def every_significand() -> torch.Tensor:
    return (torch.arange(1 << 23, dtype=torch.int32) + 0x3F800000).view(torch.float32)


def test_the_table_holds_the_measured_counts() -> None:
    """And, by its hash, the measured entry at every place."""
    table = ulp_table()
    digest = hashlib.sha256(table.to(torch.int8).numpy().tobytes()).hexdigest()
    assert digest == "862bea101da795bf5fd46df9dfe5142a79c29edd831e2da30aa84385d885e8fe"
    assert [(table == d).sum().item() for d in (-1, 0, 1)] == [374_723, 7_280_086, 733_799]


def test_every_significand_is_the_rounded_reciprocal_moved_by_its_entry() -> None:
    x = every_significand()
    assert torch.equal(bits(approximate(x)), bits(1.0 / x) + ulp_table())


def test_the_exponent_is_exact_and_the_sign_is_kept() -> None:
    x = every_significand()[::997]
    for power in (-120, -1, 1, 100, 125):
        assert torch.equal(approximate(-x * 2.0**power), -approximate(x) * 2.0**-power)


def test_subnormals_are_flushed_on_both_sides() -> None:
    x = torch.tensor([1e-39, -1e-39, 0.0, -0.0, 2.0**-126, 2.0**126 * 1.5, torch.inf, -torch.inf])
    got = approximate(x)
    assert got.tolist() == [torch.inf, -torch.inf, torch.inf, -torch.inf, 2.0**126, 0.0, 0.0, -0.0]
    assert torch.signbit(got).tolist() == [False, True, False, True, False, False, False, True]
    assert approximate(torch.tensor([torch.nan])).isnan().all()


def test_the_reciprocal_of_six_is_correctly_rounded() -> None:
    assert bits(approximate(torch.tensor([6.0]))).item() == 0x3E2AAAAB


def test_sites_move_one_by_one() -> None:
    x = torch.tensor([3.0])
    rcp = Reciprocal(six=1, multiplier=-1)
    assert [bits(rcp(x, site)).item() - 0x3EAAAAAB for site in ("six", "outer", "multiplier")] == [1, 0, -1]


def test_zero_infinity_and_nan_are_not_moved() -> None:
    x = torch.tensor([0.0, torch.inf, -torch.inf])
    assert torch.equal(nudge(x, 1), x)
    assert nudge(torch.tensor([torch.nan]), 1).isnan().all()


def test_the_corners_are_all_signs_at_three_sites() -> None:
    assert len(set(corners())) == 8
    assert {NAMED["+1ulp"], NAMED["-1ulp"]} <= set(corners())
