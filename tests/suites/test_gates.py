"""The gate passes noise, fails on a planted drop by name, and refuses what cannot be compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quads.compare.records import RecordsError
from quads.errors import CannotRunHereError, GateFailedError
from quads.suites import gates, statistics, summary
from quads.suites.gates import Margin, check, fell
from tests.suites.made_results import ARMS, Made, write

Numbers = dict[str, Any]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer resamples: noisier ends of the same intervals."""
    monkeypatch.setattr(statistics, "RESAMPLES", 400)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The baseline of all tests, which none changes."""
    out = tmp_path_factory.mktemp("old")
    summary.write(write(out, ARMS))
    return out


def made(out: Path, noise: int, **arms: Made) -> Path:
    summary.write(write(out, {**ARMS, **arms}, noise=noise))
    return out


def copied(old: Path, out: Path) -> Path:
    shutil.copy(old / "summary.json", out)
    return out


def changed(path: Path, change: Callable[[Numbers], object]) -> Path:
    document = json.loads((path / "summary.json").read_text())
    change(document)
    (path / "summary.json").write_text(json.dumps(document))
    return path


def test_a_summary_passes_against_itself(old: Path) -> None:
    checked = check(old / "summary.json", old)
    assert len(checked) == len(gates.OUTCOMES) * len(ARMS) and not any(entry.fell for entry in checked)


def test_other_seeds_and_problems_of_the_same_arms_pass(old: Path, tmp_path: Path) -> None:
    for noise in range(1, 5):
        check(old, made(tmp_path / f"new{noise}", noise))


def test_a_planted_drop_of_accuracy_fails_by_name_with_both_values(old: Path, tmp_path: Path) -> None:
    new = made(tmp_path, 1, quads=Made(gap=0.01, accuracy=0.7))
    with pytest.raises(
        GateFailedError, match=r"; accuracy|: accuracy of quads in plain: 0\.\d+ \[.*\] -> 0\.7"
    ) as caught:
        check(old, new)
    assert "nvfp4" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_planted_gap_fails_and_a_smaller_one_passes(old: Path, tmp_path: Path) -> None:
    check(old, made(tmp_path / "better", 1, quads=Made(gap=0.005)))
    with pytest.raises(GateFailedError, match="gap_mean of quads in plain"):
        check(old, made(tmp_path / "worse", 1, quads=Made(gap=0.013)))


def test_bf16_that_no_longer_learns_fails(old: Path, tmp_path: Path) -> None:
    new = made(tmp_path, 1, bf16=Made(gap=1e-6, accuracy=0.4))
    with pytest.raises(GateFailedError, match="bf16 no longer learns in plain"):
        check(old, new)


def test_an_arm_that_begins_to_collapse_fails(old: Path, tmp_path: Path) -> None:
    new = made(tmp_path, 1, nvfp4=Made(gap=0.02, collapse=45))
    with pytest.raises(GateFailedError, match="nvfp4 collapses in 4 of 4 in plain"):
        check(old, new)


def test_a_claim_that_turns_round_fails(old: Path, tmp_path: Path) -> None:
    new = copied(old, tmp_path)
    changed(new, lambda document: document["hypotheses"][0].update(verdict="refuted"))
    with pytest.raises(GateFailedError, match="hypothesis h was supported and is refuted"):
        check(old, new)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("identity", "0" * 12, "identity"),
        ("label", "measured (NVIDIA H200)", r"label emulated \(CPU\) -> measured \(NVIDIA H200\)"),
        ("suite", "other", "suite made -> other"),
    ],
)
def test_other_settings_or_hardware_are_not_comparable(
    old: Path, tmp_path: Path, key: str, value: str, says: str
) -> None:
    new = copied(old, tmp_path)
    with pytest.raises(CannotRunHereError, match=says):
        check(old, changed(new, lambda document: document.update({key: value})))


def test_settings_that_differ_are_listed(old: Path, tmp_path: Path) -> None:
    new = copied(old, tmp_path)
    changed(new, lambda document: (document.update(identity="x"), document["settings"].update(steps=7)))
    with pytest.raises(CannotRunHereError, match=r"settings\.steps: 60 -> 7"):
        check(old, new)


def test_an_unfinished_run_is_not_compared(old: Path, tmp_path: Path) -> None:
    new = copied(old, tmp_path)
    changed(new, lambda document: document["outcomes"][1].update(steps=40))
    with pytest.raises(CannotRunHereError, match="nvfp4 in plain is at step 40 of 60"):
        check(old, new)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema": 1}', '{"schema": 2, "suite": "made"}'])
def test_a_malformed_summary_is_named(old: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "new.json").write_text(text)
    with pytest.raises(RecordsError, match=r"new\.json"):
        check(old, tmp_path / "new.json")


def test_a_summary_of_another_form_is_named(old: Path, tmp_path: Path) -> None:
    new = copied(old, tmp_path)
    changed(new, lambda document: document["outcomes"][0].pop("accuracy"))
    with pytest.raises(RecordsError, match="accuracy"):
        check(old, new)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        check(tmp_path / "none.json", tmp_path)


numbers = st.tuples(st.floats(0, 1), st.floats(0, 0.3)).map(
    lambda pair: {"value": pair[0], "low": pair[0] - pair[1], "high": pair[0] + pair[1]}
)
margins = st.builds(Margin, better=st.sampled_from(["lower", "higher"]), absolute=st.floats(0, 0.1))


@given(numbers, numbers, margins)
def test_only_one_of_two_can_have_fallen_below_the_other(old: Numbers, new: Numbers, margin: Margin) -> None:
    assert not (fell(old, new, margin) and fell(new, old, margin)) and not fell(old, old, margin)


@given(numbers, numbers, margins)
def test_a_wider_margin_never_fails_more(old: Numbers, new: Numbers, margin: Margin) -> None:
    wider = Margin(better=margin.better, absolute=margin.absolute + 0.1)
    assert fell(old, new, margin) or not fell(old, new, wider)
