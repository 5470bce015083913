"""The main job end to end, small: its files, its resumption, and what it refuses."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from quads.compare import job
from quads.compare.characters import character_tokenizer
from quads.compare.checkpoint import load_state
from quads.compare.config import CompareError
from quads.compare.records import Records
from quads.errors import CannotRunHereError
from quads.models import ModelError
from tests.quads.compare_run import config, evaluations, records, run, spawn
from tests.quads.tiny import tiny_model

pytest.importorskip("trl")
pytest.importorskip("plotly")

GROUPS = {"reward", "train", "rollout", "gap", "throughput", "time"}
PROMISED = {
    "reward/mean", "gap/mean", "gap/p99", "gap/max", "gap/k3", "gap/k3_reverse", "gap/ess", "gap/tokens",
    "train/entropy", "train/grad_norm", "throughput/rollout_tokens_per_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of one arm."""
    out = tmp_path_factory.mktemp("whole")
    run(out)
    return out


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    out = tmp_path / "copied"
    shutil.copytree(whole, out)
    return out


def test_a_step_has_one_flat_record_with_everything_promised(whole: Path) -> None:
    lines = [json.loads(line) for line in (whole / "runs.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line.keys() >= PROMISED
        assert {key.split("/")[0] for key in line if "/" in key} == GROUPS
        assert not any(isinstance(value, dict | list) for value in line.values())
        assert line["gap/tokens"] == line["rollout/tokens"] > 16
        assert 0 < line["gap/mean"] <= line["gap/p99"] <= line["gap/max"]
        assert 0 < line["gap/ess"] <= 1


def test_accuracy_is_measured_at_the_start_at_intervals_and_at_the_end(whole: Path) -> None:
    lines = evaluations(whole)
    assert [line["step"] for line in lines] == [0, 2, 3]
    assert all(len(line["eval/correct"]) == 16 for line in lines)
    assert all(line["eval/accuracy"] == line["eval/correct"].count("1") / 16 for line in lines)


def test_the_config_and_the_stamp_are_written(whole: Path) -> None:
    settings = json.loads((whole / "config.json").read_text())
    assert settings["shared"] == json.loads(json.dumps(config(whole).identity()))
    assert settings["recipes"]["quads"]["rac_ratio"] == 0.5
    assert json.loads((whole / "stamp.json").read_text())["seeds"] == [0]
    assert "quads compare" in (whole / "report.html").read_text()


def test_the_stamps_of_earlier_runs_of_the_folder_stay(copied: Path) -> None:
    first = json.loads((copied / "stamp.json").read_text())
    run(copied)
    assert json.loads((copied / "stamp.json").read_text())["earlier"] == [first]
    run(copied)
    assert len(json.loads((copied / "stamp.json").read_text())["earlier"]) == 2


def test_a_local_model_folder_is_trained_with_its_own_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    run(tmp_path / "out", model=str(folder), steps=1, arms=("bf16", "quads"), dtype="bfloat16")
    bf16, quads = records(tmp_path / "out")
    # bf16 arithmetic has a floor of its own: cached decoding rounds elsewhere than the full pass does.
    assert 0 < bf16["gap/mean"] < quads["gap/mean"]
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file"):
        run(tmp_path / "other", model=str(folder))
    assert not (tmp_path / "other").exists()


def test_a_killed_run_goes_on_to_the_records_of_an_uninterrupted_one(whole: Path, tmp_path: Path) -> None:
    process = spawn(tmp_path)
    state = tmp_path / "arms" / "quads-seed0" / "state.safetensors"
    try:
        deadline = time.monotonic() + 240
        while not state.exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert len(records(tmp_path)) < 3
    assert "quads-seed0: resumed after step" in run(tmp_path)
    assert records(tmp_path) == records(whole)
    assert evaluations(tmp_path) == evaluations(whole)


def test_an_interrupt_leaves_a_folder_that_goes_on(whole: Path, tmp_path: Path) -> None:
    process = spawn(tmp_path)
    runs = tmp_path / "runs.jsonl"
    try:
        deadline = time.monotonic() + 240
        while not runs.exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    run(tmp_path)
    assert records(tmp_path) == records(whole)


def test_a_finished_run_writes_nothing_new(copied: Path) -> None:
    before = (copied / "runs.jsonl").read_bytes()
    run(copied)
    assert (copied / "runs.jsonl").read_bytes() == before


def test_a_half_written_line_is_dropped_and_said(copied: Path) -> None:
    before = (copied / "runs.jsonl").read_bytes()
    with (copied / "runs.jsonl").open("a") as handle:
        handle.write('{"schema": 1, "arm": "quads", "seed": 0, "st')
    assert "ended in a half-written line: dropped" in run(copied)
    assert (copied / "runs.jsonl").read_bytes() == before


def test_a_record_newer_than_the_checkpoint_is_dropped_and_said(copied: Path) -> None:
    before = (copied / "runs.jsonl").read_bytes()
    Records(copied / "runs.jsonl").append({**records(copied)[-1], "step": 4})
    assert "1 records were newer than the checkpoint" in run(copied)
    assert (copied / "runs.jsonl").read_bytes() == before


def test_lost_records_are_refused_rather_than_left_out(copied: Path) -> None:
    Records(copied / "runs.jsonl").keep(lambda record: record["step"] != 2)
    with pytest.raises(CompareError, match="lacks records of quads-seed0 before step 3"):
        run(copied)


def test_another_arm_joins_the_folder_and_the_first_stays(copied: Path) -> None:
    first = records(copied)
    said = run(copied, arms=("bf16",))
    assert records(copied)[:3] == first
    assert [(record["arm"], record["step"]) for record in records(copied)[3:]] == [
        ("bf16", 1),
        ("bf16", 2),
        ("bf16", 3),
    ]
    summary = json.loads((copied / "summary.json").read_text())
    assert list(summary["arms"]) == ["quads", "bf16"]
    assert "bf16" in said and "quads" in said
    # Paired: the first rollout starts from the same weights, prompts and noise, and sees almost the same tokens.
    assert abs(records(copied)[3]["rollout/tokens"] - first[0]["rollout/tokens"]) < 8
    assert records(copied)[3]["gap/mean"] < 1e-4 < first[0]["gap/mean"]


def test_another_config_is_refused_with_every_differing_key(copied: Path) -> None:
    before = (copied / "config.json").read_bytes()
    with pytest.raises(CompareError, match=r"holds another comparison \(lr: 0\.0001 -> 0\.5; steps: 3 -> 4\)"):
        run(copied, lr=0.5, steps=4)
    assert (copied / "config.json").read_bytes() == before


def test_another_recipe_of_the_same_name_is_refused(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "quads.toml").write_text(
        'rollout_weights = "nvfp4"\nrollout_activations = "nvfp4"\ntrain_weights = "nvfp4"\nrac_ratio = 0.25\n'
    )
    with pytest.raises(CompareError, match=r"recipes\.quads\.rac_ratio: 0\.5 -> 0\.25"):
        run(copied, arms=(str(tmp_path / "quads.toml"),))


def test_a_checkpoint_cut_short_is_refused_and_the_records_stay(copied: Path) -> None:
    state, before = copied / "arms" / "quads-seed0" / "state.safetensors", (copied / "runs.jsonl").read_bytes()
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"state\.safetensors is not a whole safetensors file"):
        run(copied)
    assert (copied / "runs.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_run_is_refused(copied: Path) -> None:
    model = tiny_model()
    with pytest.raises(CompareError, match="belongs to another run"):
        load_state(
            copied / "arms" / "quads-seed0" / "state.safetensors", model, torch.optim.AdamW(model.parameters()), "x"
        )


def test_out_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CompareError, match=r"'out' is .* which is a file"):
        run(tmp_path / "file")


def test_a_missing_model_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        run(tmp_path / "out", model=str(tmp_path / "nowhere"))
    assert not (tmp_path / "out").exists()


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(ModelError, match=r"holds only pytorch_model\.bin: checkpoints must be safetensors"):
        run(tmp_path / "out", model=str(folder))


def test_a_missing_package_is_said_with_its_remedy() -> None:
    job.check_packages(("none", "trl"))
    with pytest.raises(CannotRunHereError, match=r"no_such_package: python -m pip install no_such_package"):
        job.check_packages(("trl", "no_such_package"))
