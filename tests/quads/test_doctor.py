"""`quads doctor` names every recipe's backend and never fails on a machine that lacks something."""

from __future__ import annotations

from functools import partial
from typing import Any

from quads import doctor, recipes
from quads.integrations.vllm_plugin import backends, versions
from quads.integrations.vllm_plugin.fp4_gemms import GEMMS
from quads.kernels import support


def test_every_recipe_has_a_backend_and_a_reason() -> None:
    found = {row.topic: row for row in doctor.rows()}
    for name in recipes.named():
        for kind in ("dense", "experts"):
            assert ": " in found[f"recipe {name}, {kind}"].finding


def test_an_unsupported_vllm_is_reported_not_raised(monkeypatch: Any) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(versions, "installed", lambda: "0.33.0")
    row = next(row for row in doctor.rows() if row.topic == "vLLM")
    assert row.ok is False
    assert "supports vLLM 0.26 to 0.32; found 0.33.0" in row.finding


def test_on_blackwell_every_recipe_says_why_it_does_not_run_on_vllms_gemm(monkeypatch: Any) -> None:
    """No named recipe has one outer scale for all rows, which is what those GEMMs can multiply by."""
    monkeypatch.setattr(backends, "for_layer", partial(backends.for_layer, device="cuda"))
    monkeypatch.setattr(support, "capability", lambda device=0: (10, 0))
    monkeypatch.setattr(support, "device_name", lambda device=0: "a patched GPU, sm_100")
    found = {row.topic: row for row in doctor.rows()}
    row = found["recipe quads, experts"]
    assert row.ok is True
    assert row.finding == (
        "quads.kernels.moe (native FP4): FP4 tensor cores: a patched GPU, sm_100; not vLLM's GEMM: it multiplies by one"
        " alpha before it rounds, and activation_outer 'token' has one a row"
    )


def test_vllms_gemms_are_listed_with_what_they_need() -> None:
    found = [row for row in doctor.rows() if row.topic.startswith("vLLM's GEMM: ")]
    assert [row.topic.removeprefix("vLLM's GEMM: ") for row in found] == [gemm.name for gemm in GEMMS]
    assert all((row.finding == "yes") == (row.ok is True) for row in found)
    if support.missing_blackwell():
        assert all("needs FP4 tensor cores (sm_100 or newer)" in row.finding for row in found)
