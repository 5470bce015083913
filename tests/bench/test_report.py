"""report.html as a document; tests/browser looks at what it draws."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quads.bench import figures, figures_model, figures_rollout, figures_scaling, model_error
from quads.bench.report import write_report
from quads.bench.results import Result, ResultsFile
from quads.bench.rollout_model import PAPER
from quads.compare.records import RecordsError
from tests.bench.bench_run import ceilings, results, write_run

pytest.importorskip("plotly")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), results(), chips=("H200", "B200"))


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return write_report(folder).read_text()


@pytest.fixture(scope="module")
def modelled(folder: Path) -> list[Result]:
    return list(ResultsFile(folder).results("modelled"))


def test_the_report_loads_nothing_and_stands_beside_its_table(folder: Path, page: str) -> None:
    own = re.sub(r'(id="plotly">)[^<]+', r"\1", page, count=1)
    assert len(own) < len(page) - 1_500_000
    assert not re.search(r"(src|href)\s*=\s*['\"]?(https?:)?//", own)
    assert (folder / "table.md").read_text().startswith("*Measured* on NVIDIA H200")


def test_stamp_marks_and_what_is_left_out_stand_before_any_figure(page: str) -> None:
    top = page[page.index("<h1>") : page.index('class="plot"')]
    assert "NVIDIA H200" in top
    assert "5 of them on a throttled or shared machine" in top
    assert "deep_gemm does not import: deep_gemm" in top
    assert "budget of 480 s spent: gemm/M=4096,N=8192,K=8192" in top
    assert re.search(r"Goals: \d+ of \d+ met", top)


def test_names_from_outside_are_text_and_not_markup(tmp_path: Path) -> None:
    hostile = Result(
        op="gemm", numerics="<b>x</b>", implementation="</script><script>alert(1)", shape={"M": 1}, seconds=1.0
    )
    text = write_report(write_run(tmp_path, [hostile])).read_text()
    assert "<script>alert(1)" not in text and "<b>x</b>" not in text


def test_every_case_is_in_the_bars_of_its_group(folder: Path) -> None:
    measured = list(ResultsFile(folder).results("measured"))
    specs = figures.bars(measured).specs
    drawn = [trace for spec in specs.values() for trace in spec["data"]]
    assert sum(trace["type"] == "bar" for trace in drawn) == len(measured)
    assert {trace["text"][0].split(":")[0] for trace in drawn if "text" in trace} == {
        figures.label(r) for r in measured
    }


def test_a_bars_whiskers_are_the_results_interval() -> None:
    one = next(r for r in results() if r.op == "moe")
    [spec] = figures.bars([one]).specs.values()
    trace, _ = spec["data"]
    assert trace["x"][0] + trace["error_x"]["array"][0] == pytest.approx(1e6 * (one.seconds_high or 0))
    assert trace["x"][0] - trace["error_x"]["arrayminus"][0] == pytest.approx(1e6 * (one.seconds_low or 0))


def test_no_point_lies_above_its_formats_roof() -> None:
    spec = figures.roof(results()).specs[""]
    roofs = {t["legendgroup"]: t["y"][-1] for t in spec["data"] if t["mode"] == "lines"}
    for trace in spec["data"]:
        if trace["mode"] == "markers" and trace["legendgroup"] in roofs:
            assert max(trace["y"]) <= roofs[trace["legendgroup"]]


def test_an_axis_with_three_values_is_a_scaling_and_with_two_is_not() -> None:
    def one(m: int) -> Result:
        return Result(op="gemm", numerics="bf16", implementation="x", shape={"M": m, "N": 8}, seconds=m * 1e-6)

    assert [s.title for s in figures_scaling.scalings(map(one, (1, 2, 4)))] == ["gemm over M (N = 8)"]
    assert list(figures_scaling.scalings(map(one, (1, 2)))) == []


def test_weights_of_several_sizes_are_an_axis_of_their_own() -> None:
    shapes = ({"M": 16, "N": n, "K": n} for n in (1024, 2048, 4096))
    rows = [Result(op="gemm", numerics="bf16", implementation="x", shape=s, seconds=1e-6) for s in shapes]
    [found] = figures_scaling.scalings(rows)
    assert (found.axis, [x for x, _ in found.points]) == ("weights", [2**20, 2**22, 2**24])


def test_energy_is_of_a_token() -> None:
    rows = [r for r in results() if r.op == "moe" and r.numerics == "nvfp4"]
    [spec] = figures_scaling.energy(rows).specs.values()
    sixteen = next(r for r in rows if r.shape["tokens"] == 16)
    y = dict(zip(spec["data"][0]["x"], spec["data"][0]["y"], strict=True))
    assert y[16] == pytest.approx(1e3 * (sixteen.energy_j or 0) / 16)


def test_every_modelled_series_says_so_and_how_far_it_is_off(modelled: list[Result]) -> None:
    drawn = [
        figures_model.on_chips(modelled),
        figures_rollout.modelled(modelled),
        figures_rollout.against_fp8(modelled),
    ]
    for figure in drawn:
        for spec in figure.specs.values():
            for trace in spec["data"]:
                name = trace["name"]
                assert "abstract" in name or re.search(r", modelled \((×\d\.\d\d|unchecked)\)$", name), name


def test_modelled_bars_are_hatched_and_reach_from_error_to_error(modelled: list[Result]) -> None:
    spec = next(iter(figures_model.on_chips(modelled).specs.values()))
    for trace in spec["data"]:
        assert trace["marker"]["pattern"]["shape"]
        assert len(trace["error_y"]["array"]) == len(trace["x"]) == 2


def test_the_papers_claim_is_a_line_at_its_height(modelled: list[Result]) -> None:
    for spec in figures_rollout.against_fp8(modelled).specs.values():
        [claim] = [trace for trace in spec["data"] if "abstract" in trace["name"]]
        assert set(claim["y"]) == {PAPER}


def test_ratios_are_to_fp8_of_the_same_batch(modelled: list[Result]) -> None:
    spec = figures_rollout.against_fp8(modelled).specs["B200|qwen3-30b-a3b"]
    rows = {
        (r.numerics, r.variant, r.shape["batch"]): r for r in modelled if (r.chip, r.way) == ("B200", "qwen3-30b-a3b")
    }
    nvfp4 = next(t for t in spec["data"] if t["name"].startswith("nvfp4") and t["showlegend"])
    for batch, ratio in zip(nvfp4["x"], nvfp4["y"], strict=True):
        times = [rows[key].in_a_row_seconds or 0 for key in (("fp8", "", batch), ("nvfp4", "", batch))]
        assert ratio == pytest.approx(times[0] / times[1])


def test_without_a_ratio_nothing_is_lost_and_with_more_never_less() -> None:
    specs = figures_rollout.over_ratio().specs
    assert "B200|qwen3-30b-a3b" in specs
    for spec in specs.values():
        for trace in spec["data"]:
            assert trace["y"][0] == pytest.approx(1.0)
            assert trace["y"] == sorted(trace["y"], reverse=True)


def test_the_model_is_checked_on_the_run_itself(folder: Path) -> None:
    source, used = model_error.checks_of(ResultsFile(folder))
    spec = figures_model.checked(source, used).specs[""]
    points = [(x, y) for t in spec["data"] if t["mode"] == "markers" for x, y in zip(t["x"], t["y"], strict=True)]
    assert source == "this run, H200"
    assert len(points) == len(used)
    assert all(y / x == pytest.approx(1.1) for x, y in points)


def test_every_chip_value_has_its_source_in_the_report(page: str) -> None:
    assert "Every value and its source" in page
    assert "HGX B200, per GPU" in page and "not found" in page


def test_measured_rollouts_are_tokens_a_second() -> None:
    shape = {"batch": 32, "tokens_in": 128, "tokens_out": 128, "layers": 8}
    one = Result(op="rollout", numerics="bf16", implementation="vllm", shape=shape, seconds=0.5)
    [trace] = figures_rollout.measured([one]).specs[""]["data"]
    assert trace["y"] == [32 * 128 / 0.5]


def test_what_was_read_in_from_elsewhere_has_its_own_stamp(tmp_path: Path) -> None:
    folder = write_run(tmp_path, ceilings())
    ResultsFile(folder).append(
        {"kind": "stamp", "of": "rollout", "stamp": "other", "command": "h200_vllm.py --layers 8"}
    )
    text = write_report(folder).read_text()
    assert "<b>of</b> rollout" in text and "h200_vllm.py --layers 8" in text


def test_a_run_without_a_gpu_has_a_report(tmp_path: Path) -> None:
    one = Result(op="emulator", numerics="nvfp4", implementation="quads.emulation", shape={"M": 128}, seconds=8.4e-3)
    text = write_report(write_run(tmp_path, [one, *ceilings()[:1]], gpu=None)).read_text()
    assert "emulator: M = 128" in text
    assert "Energy of a token" not in text


def test_a_folder_without_results_or_with_broken_ones_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        write_report(tmp_path)
    (tmp_path / "results.jsonl").write_text('{"schema": 1, "kind": "result", "op": "gemm"}\n')
    with pytest.raises(RecordsError, match="missing"):
        write_report(tmp_path)


def test_figures_are_json(folder: Path, modelled: list[Result]) -> None:
    for figure in (figures.bars(list(ResultsFile(folder).results("measured"))), figures_model.roofs()):
        json.dumps(figure.specs, allow_nan=False)
