"""The paper's figures beside ours."""

from __future__ import annotations

from typing import Any

from quads.suites.report_paper import Claim, claims
from tests.suites.made_suite import made_suite


def found(summary: dict[str, Any], cell: str) -> dict[str, Claim]:
    return {claim.what: claim for claim in claims(summary, cell)}


def test_each_figure_stands_beside_the_same_arm_of_ours() -> None:
    rows = {of: (theirs, ours) for of, theirs, ours in found(made_suite(), "plain")["accuracy after RL, %"].rows}
    assert rows["nvfp4"] == ("51.37", "71.0 (70.0–72.0)")
    assert rows.keys() == {"bf16", "fp8", "nvfp4", "qat", "quads"}


def test_every_figure_has_a_source_and_a_reason_why_it_is_another_experiment() -> None:
    for claim in claims(made_suite(), "plain"):
        assert claim.source in ("abstract", "as summarised by third parties")
        assert len(claim.why.split()) > 8


def test_the_ratio_stands_beside_norm_and_chance_of_the_probe() -> None:
    rows = found(made_suite(), "")["largest gap by RAC ratio"].rows
    assert [of for of, *_ in rows] == ["12.5 %", "25 %", "50 %", "75 %", "100 %"]
    assert rows[2][1:] == ("0.854", "0.216 by norm, 0.252 by chance")


def test_the_collapse_is_the_earliest_step_or_none_in_so_many() -> None:
    assert found(made_suite(), "stress")["step of nvfp4's collapse"].rows == [("nvfp4", "150", "41 (of 60)")]
    ours = found(made_suite(), "plain")["step of nvfp4's collapse"].rows[0][2]
    assert ours == "none in 60 steps, 8 seeds"


def test_what_was_not_measured_is_left_out() -> None:
    summary = made_suite(cells=("plain",), arms=("bf16", "qat"), probed=())
    assert {of for claim in claims(summary, "plain") for of, *_ in claim.rows} == {"bf16", "qat"}
    assert claims(made_suite(cells=(), probed=()), "") == []
