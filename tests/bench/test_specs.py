"""Device specifications: every value has a source, names of devices find their chip and no other's."""

from __future__ import annotations

import re

import pytest

from quads.bench import specs
from quads.bench.specs import Value, chip, chips


def values() -> list[tuple[str, str, Value]]:
    return [
        (key, name, value)
        for key, one in chips().items()
        for name, value in vars(one).items()
        if isinstance(value, Value)
    ]


def test_the_chips_of_the_issue_are_there() -> None:
    assert list(chips()) == ["H200", "B200", "B300", "RTX-PRO-6000", "RTX-5090", "GB10"]


@pytest.mark.parametrize(("key", "name", "value"), values())
def test_every_value_is_positive_and_names_a_source(key: str, name: str, value: Value) -> None:
    assert value.value > 0
    assert specs.sources()[value.source]


@pytest.mark.parametrize(("key", "name", "value"), values())
def test_what_was_not_found_is_called_assumed_and_says_what_stands_in(key: str, name: str, value: Value) -> None:
    if value.kind == "assumed":
        assert value.note, f"{key}.{name}"
    if specs.sources()[value.source] == "not found":
        assert value.kind == "assumed", f"{key}.{name}"


@pytest.mark.parametrize("key", chips())
def test_datasheet_rates_are_dense_and_stand_in_the_ratios_of_their_widths(key: str) -> None:
    one = chip(key)
    assert one.fp8_flops.value == pytest.approx(2 * one.bf16_flops.value, rel=0.01)
    if one.nvfp4_flops:
        assert one.nvfp4_flops.value >= 1.99 * one.fp8_flops.value


@pytest.mark.parametrize("key", chips())
def test_what_is_reached_stays_below_the_datasheet(key: str) -> None:
    one = chip(key)
    assert one.copy.value < one.memory_bytes_per_s.value
    for numerics in ("bf16", "fp8", "nvfp4") if one.native_fp4 else ("bf16", "fp8"):
        assert one.matrix(numerics).value <= one.datasheet(numerics).value


def test_a_ceiling_that_is_not_given_takes_the_share_of_the_h200() -> None:
    h200, b200 = chip("H200"), chip("B200")
    assert b200.copy.value / b200.memory_bytes_per_s.value == pytest.approx(
        h200.copy.value / h200.memory_bytes_per_s.value
    )
    assert b200.copy.kind == "derived"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
    ],
)
def test_a_device_name_finds_its_own_board_only(name: str, key: str | None) -> None:
    found = specs.of_device(name)
    assert (found.key if found else None) == key


def test_an_unknown_chip_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=re.escape("chip 'H100' is unknown (known: H200, B200")):
        chip("H100")


def test_tensor_cores_without_fp4_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="H200: tensor cores have no nvfp4"):
        chip("H200").matrix("nvfp4")


def test_a_kind_that_is_not_one_is_refused() -> None:
    with pytest.raises(ValueError, match="kind 'guessed' is unknown"):
        Value(value=1.0, kind="guessed", source="none")
