"""A suite's results as Markdown."""

from __future__ import annotations

from quads.suites.report_markdown import table
from tests.suites.made_suite import made_suite


def test_every_table_has_as_many_cells_in_each_row_as_in_its_head() -> None:
    blocks = [block.splitlines() for block in table(made_suite()).split("\n\n") if block.startswith("|")]
    assert len(blocks) == 1 + 2 + 1 + 2  # hypotheses, cells, collapses, references of the probe
    for block in blocks:
        rows = [line for line in block if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in rows}) == 1


def test_every_verdict_is_there_with_its_numbers() -> None:
    text = table(made_suite())
    for entry in made_suite()["hypotheses"]:
        assert f"| **{entry['verdict']}** | {entry['claim']} " in text
    assert "−0.0060 (−0.0070 to −0.0050)" in text


def test_mean_gaps_of_the_probe_stand_by_arm_and_outliers_the_longer_list_downwards() -> None:
    text = table(made_suite(outliers=("", "8x16"), probed=("nvfp4", "quads", "fp8")))
    assert "|  | no outliers | 8x16 |\n| --- | --- | --- |\n| nvfp4 | 0.00400 (0.00367–0.00433) | 0.0360 (" in text
    text = table(made_suite(outliers=("", "8x16"), probed=("nvfp4",)))
    assert "|  | nvfp4 |\n| --- | --- |\n| no outliers | 0.00400 (0.00367–0.00433) |\n| 8x16 | 0.0360 (" in text


def test_the_label_stands_first() -> None:
    assert table(made_suite()).startswith("Label: **emulated (CPU)**.\n")


def test_a_run_without_collapse_says_so() -> None:
    assert "No run collapsed." in table(made_suite(cells=("plain",)))


def test_a_bar_in_a_cell_does_not_break_the_table() -> None:
    summary = made_suite(cells=("plain",))
    summary["hypotheses"][0]["claim"] = "|a|"
    assert "\\|a\\|" in table(summary)
