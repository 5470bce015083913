"""What the vLLM script of the GPU says of its results: goals, missing arms, failed checks."""

from __future__ import annotations

from typing import Any

from quads.bench.vllm_tables import tables


def arm(speed: float, **more: Any) -> dict[str, Any]:
    return {"tokens_per_s": {"1": speed, "32": 20 * speed}, "weights_gib": 6.0, "refit_s": [0.5], **more}


def test_a_goal_is_met_only_where_every_load_meets_it() -> None:
    arms = {"quads-static": arm(117.0), "fp8": arm(100.0), "nvfp4-marlin": arm(116.0), "nvfp4": arm(120.0)}
    arms["nvfp4-marlin"]["tokens_per_s"]["32"] = 2400.0
    lines = tables({"throughput": arms}).splitlines()
    assert any("quads-static / fp8" in line and "goal >= 1.16 (met)" in line for line in lines)
    assert any("quads-static / nvfp4-marlin" in line and "(missed or unmeasured)" in line for line in lines)


def test_an_arm_that_failed_leaves_its_error_and_no_ratio() -> None:
    said = tables({"throughput": {"quads-static": arm(117.0), "fp8": {"error": "RuntimeError: no DeepGEMM"}}})
    assert "RuntimeError: no DeepGEMM" in said
    assert "(met)" not in said


def test_a_check_that_did_not_hold_is_shouted_and_an_error_quoted() -> None:
    case = {
        "agreement": {part: {"mean": 0.1, "max": 0.5} for part in ("engine", "nudge", "quantisation")},
        "refit": {"aba_equal": False, "same_storages": True},
        "refusal": {"error": "NaN weights were accepted"},
    }
    said = tables({"smoke": {"quads": case}})
    assert "A-B-A NO" in said and "storages yes" in said and "refusal: NaN weights were accepted" in said
