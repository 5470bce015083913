"""Rollouts of the vLLM script become results: seconds of a batch, ratios to W4A4, arms that failed by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quads.bench import rollouts

ARMS: dict[str, Any] = {
    "nvfp4": {"tokens_per_s": {"1": 100.0, "32": 3200.0, "mixed": 5000.0}},
    "fp8": {"tokens_per_s": {"1": 200.0}},
    "nvfp4-marlin": {"error": "out of memory"},
}


def written(folder: Path, arms: dict[str, Any]) -> Path:
    path = folder / "vllm.json"
    path.write_text(json.dumps({"options": {"layers": 8}, "stamp": {}, "results": {"throughput": arms}}))
    return path


def test_seconds_are_of_all_output_tokens_of_a_batch(tmp_path: Path) -> None:
    first, second, _ = rollouts.results(written(tmp_path, ARMS), "stamp")
    assert (first.seconds, second.seconds) == (1.28, 1.28)
    assert (second.shape["batch"], second.shape["layers"], second.stamp) == (32, 8, "stamp")


def test_a_ratio_is_to_the_w4a4_arm_of_the_same_batch(tmp_path: Path) -> None:
    *_, fp8 = rollouts.results(written(tmp_path, ARMS), "stamp")
    assert fp8.against is not None
    assert (fp8.numerics, fp8.against.ratio) == ("fp8", 0.5)
    assert fp8.against.case == "rollout/nvfp4/quads.vllm/batch=1,tokens_in=128,tokens_out=128,layers=8,hidden=2048," + (
        "experts=128,inner=768"
    )


def test_an_arm_that_gave_nothing_is_named_with_its_reason(tmp_path: Path) -> None:
    (failed,) = rollouts.failures(written(tmp_path, ARMS))
    assert failed == {"kind": "failed", "case": "rollout/nvfp4-marlin", "why": "out of memory"}


@pytest.mark.parametrize("text", ["{}", "not json", '{"results": {"smoke": {}}}'])
def test_a_file_without_throughput_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "vllm.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no throughput"):
        list(rollouts.results(path, "stamp"))


def test_too_little_time_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts.peers, "missing_vllm", lambda: "")
    assert rollouts.missing(None) == ""
    assert rollouts.missing(1000.0) == ""
    assert "40 s are left" in rollouts.missing(40.0)


def test_every_arm_of_the_script_is_known() -> None:
    from quads.bench import vllm_throughput

    assert [arm for arm in vllm_throughput.CASES if arm not in rollouts.ARMS] == []
