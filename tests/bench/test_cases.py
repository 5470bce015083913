"""The catalogue: every operation of the benchmark, unique names, most important first, nothing made before its turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from quads.bench.cases import OPERATIONS, Group, catalogue, chosen, devices
from quads.errors import CannotRunHereError


@pytest.fixture(scope="module")
def everything() -> list[Group]:
    return [group for device in ("cuda", "cpu") for group in catalogue(device)]


def test_every_operation_but_rollouts_has_cases(everything: list[Group]) -> None:
    assert {g.op for g in everything} == set(OPERATIONS) - {"rollout"}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_names_are_unique(device: str) -> None:
    names = Counter(g.name(case) for g in catalogue(device) for case in g.cases)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_ceilings_come_first_and_quick_groups_before_the_scaling(device: str) -> None:
    groups = list(catalogue(device))
    first = [g.op == "ceiling" for g in groups]
    quick = [g.quick for g in groups]
    assert first == sorted(first, reverse=True)
    assert quick == sorted(quick, reverse=True)


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        ("gemm", "MNK"),
        ("moe", ("tokens", "experts", "hidden")),
        ("quantize", "MK"),
        ("train_step", ("tokens", "layers")),
    ],
)
def test_work_grows_along_every_axis_on_a_gpu(everything: list[Group], op: str, sizes: tuple[str, ...]) -> None:
    shapes = [g.shape for g in everything if g.op == op and g.device == "cuda"]
    assert all(len({shape[size] for shape in shapes}) > 1 for size in sizes)


@pytest.mark.parametrize(("op", "sizes"), [("emulator", "MNK"), ("diagnose", ("tokens", "layers", "hidden"))])
def test_work_grows_along_every_axis_on_a_cpu(everything: list[Group], op: str, sizes: tuple[str, ...]) -> None:
    shapes = [g.shape for g in everything if g.op == op and g.device == "cpu"]
    assert all(len({shape[size] for shape in shapes}) > 1 for size in sizes)


def test_one_operation_can_be_chosen_and_keeps_its_ceilings() -> None:
    assert {g.op for g in chosen(catalogue("cpu"), ["refit"], quick=True)} == {"ceiling", "refit"}


def test_an_unknown_operation_is_named() -> None:
    with pytest.raises(ValueError, match="--only 'gem' is no operation"):
        chosen(iter(()), ["gem"], quick=False)


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match="--device 'tpu' is unknown"):
        devices("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_wanted_gpu_that_is_missing_cannot_run_here() -> None:
    with pytest.raises(CannotRunHereError, match="no CUDA GPU"):
        devices("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["gemm", "moe", "quantize_rac"])
def test_a_gpu_case_is_right_at_its_quick_shape(op: str) -> None:
    def first(groups: Iterator[Group]) -> Group:
        return next(g for g in groups if g.op == op)

    group = first(catalogue("cuda"))
    inputs = group.inputs()
    for case in group.cases[:2]:
        check = case.ready(inputs).check
        assert check is not None
        assert check() <= 1
