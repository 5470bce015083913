"""Predicates return their own reason, and the dispatch can be asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quads.kernels import dispatch, support


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Pretend that the machine has a GPU of the capability in request.param, or none."""
    monkeypatch.setattr(support, "capability", lambda device=0: request.param)
    name = "no CUDA GPU" if request.param is None else f"GPU, sm_{request.param[0]}{request.param[1]}"
    monkeypatch.setattr(support, "device_name", lambda device=0: name)
    yield


on = pytest.mark.parametrize


@on("chip", [None], indirect=True)
def test_without_a_gpu_every_predicate_says_so(chip: None) -> None:
    assert support.missing_gpu() == "needs a CUDA GPU; found no CUDA GPU"
    assert support.missing_hopper() == "needs Hopper tensor cores (sm_90); found no CUDA GPU"
    assert support.missing_blackwell() == "needs FP4 tensor cores (sm_100 or newer); found no CUDA GPU"
    assert support.native_level() == 0


@on(
    ("chip", "level", "missing"),
    [
        ((7, 5), 0, {"ampere", "hopper", "blackwell"}),
        ((8, 0), 0, {"hopper", "blackwell"}),
        ((8, 9), 89, {"hopper", "blackwell"}),
        ((9, 0), 89, {"blackwell"}),
        ((10, 0), 100, {"hopper"}),
        ((12, 0), 100, {"hopper"}),
    ],
    indirect=["chip"],
)
def test_capabilities_decide(chip: None, level: int, missing: set[str]) -> None:
    assert support.native_level() == level
    reasons = {name: getattr(support, f"missing_{name}")() for name in ("ampere", "hopper", "blackwell")}
    assert {name for name, reason in reasons.items() if reason} == missing
    assert all("found GPU" in reasons[name] and "\n" not in reasons[name] for name in missing)


@on(
    ("chip", "operation", "tokens", "way"),
    [
        ((9, 0), "quantize", 1, "portable"),
        ((10, 3), "quantize", 1, "native"),
        ((9, 0), "gemm", 16, "decode"),
        ((9, 0), "gemm", 8192, "prefill"),
        ((10, 0), "gemm", 16, "native"),
        ((8, 0), "gemm", 16, "portable"),
        ((9, 0), "fp8", 1, "native"),
    ],
    indirect=["chip"],
)
def test_the_dispatch_names_its_choice(chip: None, operation: str, tokens: int, way: str) -> None:
    choice = dispatch.pick(operation, tokens=tokens)
    assert choice.way == way
    assert str(choice).startswith(f"{operation}: {way} (")


@on("chip", [None, (7, 0)], indirect=True)
def test_what_cannot_run_says_why_in_one_line(chip: None) -> None:
    for choice in dispatch.pick_all():
        assert choice.way == "" and "needs" in choice.missing and "found" in choice.missing
        assert "\n" not in str(choice)


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="operation 'conv' is unknown"):
        dispatch.pick("conv")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_launch_without_a_gpu_is_refused_in_one_line() -> None:
    with pytest.raises(RuntimeError, match=r"^gemm needs a CUDA GPU; found no CUDA GPU$"):
        support.check_launch(torch.zeros(1), "gemm")
