"""Predictions: of every chip and case, with the error beside each, from a run's own measurements where it has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quads.bench import model, model_error
from quads.bench.model_error import Anchors
from quads.bench.operations import works
from quads.bench.results import Result, result
from quads.bench.specs import chip, chips
from tests.bench.bench_run import measured, results, write_run

PRODUCT = {"M": 16, "N": 8192, "K": 8192}


def case(numerics: str = "nvfp4", implementation: str = "quads.kernels", **more: str) -> Result:
    return Result(op="gemm", numerics=numerics, implementation=implementation, shape=PRODUCT, seconds=0.0, **more)


def test_every_prediction_is_labelled_and_names_chip_and_error() -> None:
    found = list(model.predictions(None, ("B200",)))
    assert {one.label for one in found} == {"modelled"}
    assert {one.chip for one in found} == {"B200"}
    assert all(one.model_error is not None and one.model_error.cases > 0 for one in found)
    assert {one.op for one in found} >= {"gemm", "moe", "quantize", "quantize_rac", "fake_quantize", "rollout"}


def test_a_prediction_survives_its_file() -> None:
    one = model.predict(case(), chip("B200"))
    assert one is not None
    assert result(one.record()) == one
    assert one.case == "modelled/B200/gemm/nvfp4/quads.kernels/M=16,N=8192,K=8192"


def test_a_faster_memory_gives_a_faster_decode_product() -> None:
    times = {key: model.predict(case("bf16", "torch.cublas"), one) for key, one in chips().items()}
    seconds = {key: one.in_a_row_seconds for key, one in times.items() if one}
    assert seconds["B300"] < seconds["B200"] < seconds["H200"] < seconds["RTX-5090"] < seconds["GB10"]


def test_fp4_tensor_cores_that_never_ran_are_called_unchecked() -> None:
    b200, h200 = (model.predict(case(), chip(key)) for key in ("B200", "H200"))
    assert b200 and b200.model_error and "have run nowhere" in b200.model_error.source
    assert h200 and h200.model_error and "have run nowhere" not in h200.model_error.source


def test_what_is_not_modelled_is_left_out() -> None:
    assert works("emulator", "nvfp4", "quads.emulation", "", {"M": 1}, chip("H200")) is None
    assert works("gemm", "nvfp4", "quads.emulation", "", PRODUCT, chip("H200")) is None


def test_the_interval_is_the_prediction_times_the_errors_extremes() -> None:
    one = model.predict(case("w4a16", "vllm.marlin"), chip("H200"))
    assert one and one.model_error
    assert one.seconds_low == pytest.approx(one.seconds * one.model_error.low)
    assert one.seconds_high == pytest.approx(one.seconds * one.model_error.high)


def test_an_unknown_chip_is_refused() -> None:
    with pytest.raises(ValueError, match="chip 'H100' is unknown"):
        list(model.predictions(None, ("H100",)))


def test_a_run_on_an_h200_gives_the_errors_itself(tmp_path: Path) -> None:
    write_run(tmp_path, results(slower=1.25))
    for one in model.predictions(tmp_path, ("H200",)):
        if one.op == "gemm":
            assert one.model_error and one.model_error.ratio == pytest.approx(1.25)
            assert one.model_error.source == "this run, H200"


def test_a_run_on_another_machine_does_not(tmp_path: Path) -> None:
    write_run(tmp_path, results(slower=1.25), gpu="NVIDIA A100-SXM4-80GB")
    errors = model_error.of_folder(tmp_path)
    assert errors.of("gemm", "bf16", "torch.cublas", "") == model_error.known().of("gemm", "bf16", "torch.cublas", "")


def test_what_a_run_did_not_measure_keeps_its_stored_error(tmp_path: Path) -> None:
    write_run(tmp_path, [one for one in results(slower=1.25) if one.numerics != "w4a16"])
    errors, stored = model_error.of_folder(tmp_path), model_error.known()
    assert errors.of("gemm", "w4a16", "vllm.marlin", "") == stored.of("gemm", "w4a16", "vllm.marlin", "")
    own = errors.of("gemm", "bf16", "torch.cublas", "")
    assert own and own.ratio == pytest.approx(1.25)


def test_the_error_is_measured_over_predicted() -> None:
    predicted = model.predict(case(), chip("H200"))
    assert predicted is not None
    assert model_error.ratio(measured(predicted, slower=1.7)) == pytest.approx(1.7)


def test_stored_measurements_are_of_an_h200_and_covered_by_the_model() -> None:
    source, stored = model_error.anchors()
    assert "H200" in source
    assert all(one.label == "measured" and model_error.ratio(one) for one in stored)


@pytest.mark.parametrize(
    "key",
    [
        ("gemm", "nvfp4", "quads.kernels", ""),
        ("gemm", "quads", "quads.kernels", "50 %"),
        ("gemm", "bf16", "torch.cublas", ""),
        ("moe", "nvfp4", "quads.kernels", ""),
        ("moe", "quads", "quads.kernels", "50 % static"),
        ("moe", "fp8_block", "vllm.triton", ""),
        ("quantize", "nvfp4", "quads.kernels", "tensor"),
        ("rollout", "bf16", "vllm", ""),
        ("rollout", "nvfp4", "quads.vllm", ""),
        ("rollout", "quads", "quads.vllm", "static"),
    ],
    ids=" ".join,
)
def test_the_model_is_within_a_quarter_where_it_says_so(key: tuple[str, ...]) -> None:
    error = model_error.known().of(*key)
    assert error and 0.8 < error.ratio < 1.25


OURS, VLLM = "quads.kernels", "quads.vllm"
PUBLISHED = {
    "our products, naive / RAC 50 %": (("gemm", "nvfp4", OURS, ""), ("gemm", "quads", OURS, "50 %")),
    "our MoE layer, naive / static": (("moe", "nvfp4", OURS, ""), ("moe", "quads", OURS, "50 % static")),
    "cuBLAS bf16 / vLLM bf16 MoE": (("gemm", "bf16", "torch.cublas", ""), ("moe", "bf16", "vllm.triton", "")),
    "rollout: W4A4 / RAC static": (("rollout", "nvfp4", VLLM, ""), ("rollout", "quads", VLLM, "static")),
    "rollout: bf16 / FP8": (("rollout", "bf16", "vllm", ""), ("rollout", "fp8", "vllm.deep_gemm", "")),
}


@pytest.mark.parametrize("row", PUBLISHED)
def test_the_published_errors_are_the_models(row: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench-model.md").read_text()
    [line] = [line for line in page.splitlines() if line.startswith(f"| {row} |")]
    errors = [model_error.known().of(*key) for key in PUBLISHED[row]]
    shown = [f"{e.ratio:.2f} ({e.low:.2f}–{e.high:.2f}, {e.cases})" for e in errors if e]
    assert [cell.strip() for cell in line.strip("| ").split("|")[1:]] == shown


def test_marlin_is_slower_than_its_bytes_and_the_model_says_so() -> None:
    error = model_error.known().of("gemm", "w4a16", "vllm.marlin", "")
    assert error and error.ratio > 1.5


def test_a_case_without_its_own_measurement_says_whose_error_it_shows() -> None:
    error = model_error.known().of("moe", "bf16", "another", "")
    own = model_error.known().of("moe", "bf16", "vllm.triton", "")
    assert error and own
    assert "of all of moe bf16, the case itself not being among them" in error.source
    assert error.ratio == own.ratio
    assert model_error.known().of("dance", "", "", "") is None


def anchors_of(
    folder: Path, run: list[Result], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[model_error.Anchors]]:
    """How many anchors `run` gave, and all of anchors.json after it."""
    write_run(folder / "bench-h200", run)
    monkeypatch.setattr(model_error, "__file__", str(folder / "model_error.py"))
    count = model_error.write(folder / "bench-h200")
    parts = json.loads((folder / "anchors.json").read_text())["anchors"]
    return count, [Anchors(part["source"], tuple(map(result, part["results"]))) for part in parts]


def test_anchors_are_taken_from_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, [own, *_] = anchors_of(tmp_path, results(slower=1.25), monkeypatch)
    assert len(own.results) == count > 50
    assert own.source == "bench-h200, NVIDIA H200, 0123456"
    assert all(model_error.ratio(one) == pytest.approx(1.25) for one in own.results)


def test_operations_that_a_run_did_not_measure_keep_their_anchors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = [one for one in results(slower=1.25) if one.op == "moe"]
    _, [own, *others] = anchors_of(tmp_path, run, monkeypatch)
    before = [one for part in model_error.stored() for one in part.results if one.op != "moe"]
    assert {one.op for one in own.results} == {"moe"}
    assert [one.case for part in others for one in part.results] == [one.case for one in before]


def test_a_run_that_the_model_does_not_cover_gives_no_anchors(tmp_path: Path) -> None:
    write_run(tmp_path, [])
    with pytest.raises(ValueError, match="no measured result that the model covers"):
        model_error.write(tmp_path)
