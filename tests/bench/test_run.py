"""The job: lines as they come, resuming, budget, checks before speeds, what is skipped and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quads.bench import cases, identity, measure, model, run
from quads.bench.cases import Case, Group, Ready
from quads.bench.results import Result, ResultsFile


def quiet() -> Console:
    return Console(file=open("/dev/null", "w"), highlight=False)


class Calls:
    """Cases that count how often they were made ready."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def case(self, name: str) -> Case:
        def ready(_: Any) -> Ready:
            self.made.append(name)
            return Ready(calls=[lambda: None], bytes=1e6, in_a_row=False)

        return Case(numerics="copy" if name == "torch.copy" else "nvfp4", implementation=name, ready=ready)

    def catalogue(self, device: str) -> Iterator[Group]:
        for op, names in (("ceiling", ["torch.copy"]), ("gemm", ["ours", "theirs"]), ("moe", ["ours"])):
            held = tuple(self.case(name) for name in names)
            yield Group(op=op, shape={"M": 1}, device=device, cases=held, quick=True, seconds=0.01)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()
    monkeypatch.setattr(cases, "catalogue", found.catalogue)
    monkeypatch.setattr(model, "predictions", lambda folder: iter(()))
    monkeypatch.setattr(run.rollouts, "missing", lambda left: "needs vllm; it is not installed")
    return found


def config(folder: Path, **more: Any) -> run.RunConfig:
    return run.RunConfig(out=folder, device="cpu", report=False, **more)


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return ResultsFile(folder).records(kind)


def test_the_first_line_is_the_stamp_and_results_carry_its_key(tmp_path: Path, calls: Calls) -> None:
    run.run(config(tmp_path), quiet())
    first = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[0])
    assert (first["kind"], first["schema"]) == ("stamp", 1)
    assert {r.stamp for r in ResultsFile(tmp_path).results("measured")} == {first["stamp"]}


def test_shares_are_of_the_ceiling_of_the_same_run(tmp_path: Path, calls: Calls) -> None:
    run.run(config(tmp_path), quiet())
    copy, ours, *_ = ResultsFile(tmp_path).results("measured")
    assert copy.op == "ceiling"
    assert copy.bytes_per_s is not None
    assert ours.bytes_per_s is not None
    assert ours.share_of_copy == pytest.approx(ours.bytes_per_s / copy.bytes_per_s)


def test_a_second_run_measures_only_what_is_missing(tmp_path: Path, calls: Calls) -> None:
    run.run(config(tmp_path, only=("gemm",)), quiet())
    calls.made.clear()
    outcome = run.run(config(tmp_path), quiet())
    assert calls.made == ["ours"]
    assert outcome.results == 1


def test_a_resumed_run_takes_its_shares_from_the_ceiling_measured_before(tmp_path: Path, calls: Calls) -> None:
    run.run(config(tmp_path, only=("gemm",)), quiet())
    run.run(config(tmp_path), quiet())
    assert [r.share_of_copy is not None for r in ResultsFile(tmp_path).results("measured") if r.op == "moe"] == [True]


def test_other_sources_are_measured_again(tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    run.run(config(tmp_path), quiet())
    calls.made.clear()
    monkeypatch.setattr(identity, "sources_digest", lambda: "changed")
    run.run(config(tmp_path), quiet())
    assert len(calls.made) == 4


def test_a_spent_budget_skips_the_rest_and_says_so(tmp_path: Path, calls: Calls) -> None:
    outcome = run.run(config(tmp_path, budget=0.0), quiet())
    assert (outcome.results, outcome.skipped) == (0, 4)
    assert {line["why"] for line in lines(tmp_path, "skipped")[:3]} == {"budget of 0 s spent"}


def test_no_speed_is_taken_while_an_operation_is_wrong(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dense() -> Iterator[str]:
        yield "M=1"
        raise AssertionError("M=7: 3.00 times the bound")

    monkeypatch.setattr(run, "checks", lambda device: {"gemm": dense})
    run.run(config(tmp_path), quiet())
    assert calls.made == ["torch.copy", "ours"]  # the ceiling and the other operation
    (check,), (failed,) = lines(tmp_path, "check"), lines(tmp_path, "failed")
    assert check["passed"] is False
    assert "3.00 times the bound; not timed" in failed["why"].replace("'", "")


def test_a_check_runs_once_for_the_operations_that_share_it(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def products() -> Iterator[str]:
        ran.append(1)
        yield "M=1"

    monkeypatch.setattr(run, "checks", lambda device: {"gemm": products, "moe": products})
    run.run(config(tmp_path), quiet())
    assert ran == [1]
    assert [(c["name"], c["passed"], c["compared"]) for c in lines(tmp_path, "check")] == [("products", True, ["M=1"])]


def test_a_check_that_another_process_ran_for_this_run_is_taken(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def products() -> Iterator[str]:
        raise AssertionError("ran again")
        yield

    monkeypatch.setattr(run, "checks", lambda device: {"gemm": products})
    monkeypatch.setattr(identity, "sources_digest", lambda: "the same")
    key = identity.stamp()["stamp"]
    line = {"kind": "check", "name": "products", "passed": True, "compared": ["M=1"], "why": "", "seconds": 1.0}
    ResultsFile(tmp_path).append({**line, "stamp": key})
    assert run.run(config(tmp_path), quiet()).results == 4


def test_an_absent_peer_is_named_once(tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = replace(calls.case("theirs"), missing=lambda: "needs theirs; it is not installed")

    def catalogue(device: str) -> Iterator[Group]:
        for op in ("gemm", "moe"):
            held = (calls.case("ours"), missing)
            yield Group(op=op, shape={"M": 1}, device=device, cases=held, quick=True, seconds=0.01)

    monkeypatch.setattr(cases, "catalogue", catalogue)
    run.run(config(tmp_path), quiet())
    assert [line["peer"] for line in lines(tmp_path, "absent")] == ["theirs"]


def test_a_half_written_line_is_dropped_and_its_case_measured_again(tmp_path: Path, calls: Calls) -> None:
    run.run(config(tmp_path), quiet())
    path = tmp_path / "results.jsonl"
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if b'"kind": "result"' in line]
    path.write_bytes(b"".join(whole[:-1]) + whole[-1][:20])
    calls.made.clear()
    run.run(config(tmp_path), quiet())
    assert calls.made == ["ours"]


def test_a_machine_without_a_gpu_names_what_needs_one(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.support, "missing_gpu", lambda: "needs a CUDA GPU; found no CUDA GPU")
    monkeypatch.setattr(cases, "devices", lambda wanted: ("cpu",))
    run.run(replace(config(tmp_path), device="auto"), quiet())
    skipped = [line["case"] for line in lines(tmp_path, "skipped")]
    assert skipped == ["rollout", "ceiling on a GPU", "gemm on a GPU", "moe on a GPU"]


def test_other_chips_are_modelled(tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    modelled = Result(
        op="gemm", numerics="nvfp4", implementation="ours", shape={"M": 1}, seconds=1.0, label="modelled", chip="B200"
    )
    monkeypatch.setattr(model, "predictions", lambda folder: iter([modelled]))
    run.run(config(tmp_path), quiet())
    assert list(ResultsFile(tmp_path).results("modelled")) == [modelled]


def test_a_model_that_fails_leaves_what_was_measured(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> Iterator[Result]:
        raise ValueError("no such chip")

    monkeypatch.setattr(model, "predictions", broken)
    assert run.run(config(tmp_path), quiet()).results == 4
    assert [line["why"] for line in lines(tmp_path, "failed")] == ["ValueError: no such chip"]


def test_rollouts_measured_before_are_read(tmp_path: Path, calls: Calls) -> None:
    given = tmp_path / "vllm.json"
    arms = {"throughput": {"nvfp4": {"tokens_per_s": {"32": 4096.0}}}}
    given.write_text(json.dumps({"options": {"layers": 8}, "stamp": {}, "results": arms}))
    run.run(config(tmp_path / "out", rollout=given), quiet())
    assert [r.seconds for r in ResultsFile(tmp_path / "out").results() if r.op == "rollout"] == [1.0]


def test_a_rollout_file_that_does_not_exist_is_bad_input(tmp_path: Path, calls: Calls) -> None:
    with pytest.raises(FileNotFoundError, match=r"--rollout .*missing"):
        run.run(config(tmp_path, rollout=tmp_path / "missing"), quiet())
    assert not (tmp_path / "results.jsonl").exists()


def test_checks_on_a_gpu_cover_every_operation_with_kernels() -> None:
    pytest.importorskip("triton")
    assert set(measure.checks("cuda")) >= {"gemm", "moe", "quantize", "quantize_rac", "fake_quantize", "refit"}
