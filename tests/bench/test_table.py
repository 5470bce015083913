"""The Markdown table of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from quads.bench import table
from quads.bench.results import Result
from tests.bench.bench_run import ceilings, results, write_run


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return table.markdown(write_run(tmp_path_factory.mktemp("run"), results(), chips=("H200", "B200")))


def row(text: str, start: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_it_says_where_the_numbers_were_measured_and_how(text: str) -> None:
    assert text.startswith("*Measured* on NVIDIA H200, torch 2.11.0, triton 3.6.0, at 0123456: `quads bench run")


def test_a_product_stands_beside_its_peers_with_intervals(text: str) -> None:
    cells = row(text, "M = 16")
    one = next(r for r in results() if r.op == "gemm" and r.shape == {"M": 16, "N": 8192, "K": 8192})
    assert cells[1] == f"{1e6 * one.seconds:,.1f} us"
    assert all("x (" in cell for cell in cells[2:])


def test_what_was_throttled_is_marked(text: str) -> None:
    assert all(cell.endswith("†") for cell in row(text, "M = 8,192")[2:])


def test_predictions_are_labelled_and_carry_their_error(text: str) -> None:
    modelled = text[text.index("*Modelled*") :]
    cells = row(modelled, "gemm, M = 16: nvfp4 · quads.kernels")
    assert len(cells) == 1 + 2 + 1
    assert cells[-1].count("–") == 1
    assert "H200 | B200" in modelled


def test_rollouts_are_ratios_to_fp8_beside_the_abstracts_figure(text: str) -> None:
    modelled = text[text.index("*Modelled* rollout") :]
    assert "about 1.16x" in modelled
    assert not any(line.startswith("| B200 | fp8") for line in modelled.splitlines())


def test_measured_and_modelled_never_share_a_table(text: str) -> None:
    measured, _, modelled = text.partition("*Modelled*")
    assert "95 % of the median" in measured
    assert "95 % of the median" not in modelled


def test_every_line_of_a_table_has_as_many_cells_as_its_head(text: str) -> None:
    for block in text.split("\n\n"):
        widths = {line.count("|") for line in block.splitlines() if line.startswith("|")}
        assert len(widths) <= 1, block[:200]


def test_a_run_without_a_gpu_has_its_own_table(tmp_path: Path) -> None:
    one = Result(op="emulator", numerics="nvfp4", implementation="quads.emulation", shape={"M": 128}, seconds=8.4e-3)
    text = table.markdown(write_run(tmp_path, [one, *ceilings()], gpu=None))
    assert text.startswith("*Measured* on a processor (no GPU)")
    assert "| emulator/nvfp4/quads.emulation/M=128 | 8.4 ms |" in text


def test_predictions_alone_say_that_nothing_was_measured(tmp_path: Path) -> None:
    assert table.markdown(write_run(tmp_path, [], chips=("GB10",))).startswith("Nothing was measured.\n\n*Modelled*")


def test_measured_rollouts_are_a_row_an_arm(tmp_path: Path) -> None:
    shape = {"batch": 32, "tokens_in": 128, "tokens_out": 128, "layers": 8}
    one = Result(op="rollout", numerics="bf16", implementation="vllm", shape=shape, seconds=0.5)
    text = table.markdown(write_run(tmp_path, [one]))
    assert "| arm | batch 32 |" in text and "| bf16 · vllm | 8,192 |" in text


def test_a_bar_in_a_cell_does_not_break_the_table() -> None:
    assert table.grid(["a"], [["x|y"]]).splitlines()[-1] == "| x\\|y |"
