"""`quads doctor` names every recipe's backend and never fails on a machine that lacks something."""

from __future__ import annotations

from typing import Any

from quads import doctor, recipes
from quads.integrations.vllm_plugin import versions


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
