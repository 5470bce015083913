"""What moved between two results."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quads.suites.report import ReportError
from quads.suites.report_compare import Comparison, compare
from tests.suites.made_suite import interval, made_suite, write_suite

pytest.importorskip("plotly")


def against(tmp_path: Path, change: Any = None) -> Comparison:
    old = made_suite(cells=("plain",), outliers=("",))
    new = copy.deepcopy(old)
    if change:
        change(new)
    return compare(write_suite(tmp_path / "old", old), write_suite(tmp_path / "new", new))


def test_equal_results_did_not_move(tmp_path: Path) -> None:
    found = against(tmp_path)
    assert found.moved == []
    assert found.notes == []
    assert "0 of" in found.headline() and "0 of 4 verdicts changed" in found.headline()


def test_intervals_that_lie_apart_are_flagged_by_cell_arm_and_metric(tmp_path: Path) -> None:
    def change(summary: Any) -> None:
        row = next(row for row in summary["outcomes"] if row["arm"] == "quads")
        row["accuracy"] = interval(0.80, 0.01)
        row["reward_last"] = interval(row["reward_last"]["value"] + 0.01, 0.02)  # overlaps

    (move,) = against(tmp_path, change).moved
    assert (move.place, move.arm, move.metric, move.change) == ("plain", "quads", "outcome/accuracy", "−0.151")


def test_a_number_without_interval_is_never_called_moved(tmp_path: Path) -> None:
    def change(summary: Any) -> None:
        summary["outcomes"][0]["gap_max"] = 1e3

    found = against(tmp_path, change)
    assert found.moved == []
    move = next(move for move in found.moves if move.metric == "run/gap_max")
    assert (move.moved, move.new["value"]) == (None, 1e3)


def test_the_probe_is_compared_at_its_place(tmp_path: Path) -> None:
    def change(summary: Any) -> None:
        summary["probe"][0]["kl"] = interval(1.0, 0.1)

    (move,) = against(tmp_path, change).moved
    assert (move.place, move.metric) == ("start/bf16", "probe/kl")


def test_changed_verdicts_settings_and_missing_arms_are_noted(tmp_path: Path) -> None:
    def change(summary: Any) -> None:
        summary["hypotheses"][0]["verdict"] = "refuted"
        summary["identity"] = "other"
        summary["learned"][0]["learned"] = False
        summary["outcomes"] = [row for row in summary["outcomes"] if row["arm"] != "rac"]

    found = against(tmp_path, change)
    assert found.verdicts[0] == ("h0", "QAT lowers the gap", "supported", "refuted")
    assert found.notes[0] == "other settings: abc123 -> other"
    assert found.notes[1] == "plain: BF16 learned: True -> False"
    assert found.notes[2].startswith("only in the old result: ") and "plain rac" in found.notes[2]


def test_the_terminal_and_the_page_show_what_moved(tmp_path: Path) -> None:
    def change(summary: Any) -> None:
        summary["outcomes"][0]["accuracy"] = interval(0.5, 0.01)
        summary["hypotheses"][0]["verdict"] = "refuted"

    found = against(tmp_path, change)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(found.render())
    shown = console.export_text()
    assert found.headline().startswith("1 of ")
    for text in ("outcome/accuracy", "0.500 (0.490–0.510)", "−0.450", "refuted"):
        assert text in shown
    path = found.write()
    assert path == tmp_path / "new" / "compare.html"
    assert path.read_text().count('<tr class="moved">') == 2


def test_a_path_that_looks_like_markup_is_text(tmp_path: Path) -> None:
    folder = tmp_path / "<b>[red]x"
    write_suite(folder, made_suite(cells=("plain",)))
    found = compare(folder, folder / "summary.json")
    assert "<b>" not in found.html().partition("<main")[0].partition("</head>")[2]


def test_a_missing_result_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"summary\.json"):
        compare(tmp_path, tmp_path)
