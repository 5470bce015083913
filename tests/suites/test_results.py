"""A folder is read as it stands: unfinished runs, half-written records, other suites' files."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quads.compare.records import RecordsError
from quads.suites import config, results
from quads.suites.results import Run, meet
from tests.suites.made_results import ARMS, append, probe_record, suite, write


def runs(arm: str, *reached: int) -> dict[int, Run]:
    """Runs of seeds 0, 1, ... that have the steps 1 to the given ones."""
    return {
        seed: Run(arm, seed, tuple({"step": step} for step in range(1, last + 1))) for seed, last in enumerate(reached)
    }


def test_arms_meet_at_the_last_step_that_all_their_seeds_reached() -> None:
    met = meet([runs("a", 300, 280), runs("b", 300, 260)], Run.trained)
    assert met and (met.step, met.seeds, met.behind) == (260, (0, 1), ())


def test_a_seed_that_has_hardly_begun_is_not_waited_for() -> None:
    met = meet([runs("a", 300, 300, 300), runs("b", 300, 300, 40)], Run.trained)
    assert met and (met.step, met.seeds, met.behind) == (300, (0, 1), (2,))


def test_seeds_of_one_arm_alone_are_not_compared() -> None:
    met = meet([runs("a", 30, 30), runs("b", 30)], Run.trained)
    assert met and met.seeds == (0,) and met.behind == (1,)


def test_arms_without_a_common_seed_do_not_meet() -> None:
    assert meet([runs("a", 30), {}], Run.trained) is None and meet([runs("a", 0)], Run.trained) is None


@given(st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=3))
def test_what_meets_was_reached_by_all_and_by_half_of_the_furthest(reached: list[list[int]]) -> None:
    arms = [runs("a", *steps) for steps in reached]
    met = meet(arms, Run.trained)
    least = [min(steps) for steps in zip(*reached, strict=True)]
    if met is None:
        assert max(least) == 0
    else:
        assert met.step == min(least[seed] for seed in met.seeds) >= max(least) / 2


def test_a_folder_is_read_with_every_cell_and_seed(tmp_path: Path) -> None:
    found = results.load(write(tmp_path, ARMS))
    assert found.suite == suite(ARMS) and found.identity == suite(ARMS).identity and found.label == "emulated (CPU)"
    assert {arm: sorted(of) for arm, of in found.cells["plain"].items()} == {arm: [0, 1, 2, 3] for arm in ARMS}
    assert found.cells["plain"]["quads"][2].steps[-1]["step"] == 60


def test_a_record_that_was_cut_off_is_left_out_and_noted(tmp_path: Path) -> None:
    out = write(tmp_path, ARMS)
    with (out / "plain" / "runs.jsonl").open("a") as handle:
        handle.write('{"schema": 1, "arm": "qu')
    found = results.load(out)
    assert found.noted == ("plain/runs.jsonl ends in a half-written record: left out",)


def test_a_broken_record_before_the_end_is_named(tmp_path: Path) -> None:
    out = write(tmp_path, ARMS)
    with (out / "plain" / "evals.jsonl").open("a") as handle:
        handle.write("nonsense\n")
    with pytest.raises(RecordsError, match=r"evals\.jsonl line \d+ is not JSON"):
        results.load(out)


def test_a_suite_that_has_only_begun_is_read_as_empty(tmp_path: Path) -> None:
    out = write(tmp_path, ARMS)
    for path in out.glob("plain/*.jsonl"):
        path.unlink()
    assert results.load(out).cells == {"plain": {}} and results.load(out).empty


def test_a_folder_without_a_suite_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="name the folder of a suite that was run"):
        results.load(tmp_path)


@pytest.mark.parametrize("name", config.shipped())
def test_a_suite_comes_back_from_its_json(name: str) -> None:
    shipped = config.load(name)
    assert results.suite_from_dict(shipped.to_dict()).identity == shipped.identity


def test_probe_records_stand_at_their_place(tmp_path: Path) -> None:
    out = write(tmp_path, ARMS)
    records = [probe_record("quads", 0, np.ones(2)), probe_record("quads", 1, np.ones(2), outliers="8x16")]
    append(out / "probe.jsonl", [*records, {"schema": 1, "kind": "layer", "layer": 0}])
    found = results.load(out)
    assert set(found.probe) == {"start/w4", "start/8x16/w4"} and len(found.layers) == 1


def test_published_records_are_read_where_they_are_packed(tmp_path: Path) -> None:
    out = write(tmp_path, ARMS)
    append(out / "probe.jsonl", [probe_record("quads", 0, np.ones(2))])
    whole = results.load(out)
    for path in (*out.glob("plain/*.jsonl"), out / "probe.jsonl"):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    packed = results.load(out)
    assert (packed.cells, packed.probe) == (whole.cells, whole.probe) and not packed.empty
    (out / "plain" / "runs.jsonl.gz").write_bytes((out / "plain" / "runs.jsonl.gz").read_bytes()[:-20])
    with pytest.raises(RecordsError, match=r"runs\.jsonl\.gz is no whole gzip file"):
        results.load(out)
