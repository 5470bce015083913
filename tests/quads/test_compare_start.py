"""The start policy: shipped, cached, made again, and middling by imitation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quads.compare import start
from quads.compare.characters import character_tokenizer
from quads.compare.config import CompareConfig
from quads.compare.policy import accuracy, load_policy
from quads.compare.start import IGNORED, StartConfig
from quads.models import ModelError

pytest.importorskip("reasoning_gym")

TINY = StartConfig(hidden=32, expert=32, layers=1, steps=6, batch=4, warmup=2)


def test_the_shipped_file_is_the_default_configs_and_small() -> None:
    path = start.find(StartConfig())
    assert path is not None and path.parent.name == "data"
    assert path.stat().st_size <= 4 * 2**20
    about = json.loads(path.with_suffix(".json").read_text())
    assert about["config"] == StartConfig().describe()
    assert about["hash"] == StartConfig().hash
    assert path.name in about["command"]
    with safe_open(path, framework="pt") as handle:
        assert {handle.get_tensor(name).dtype for name in handle.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_the_shipped_policy_is_middling() -> None:
    config = CompareConfig(held_out=256)
    policy = load_policy(config, lambda step, loss: None)
    model = policy.fresh_copy().eval()
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 3e6
    solved = accuracy(model, policy, None, config)
    # Imitation stops where a sum needs no carry (0.46 of all): 4 binomial standard deviations are 0.125.
    assert sum(solved) / len(solved) == pytest.approx(0.46, abs=0.125)


def test_forgetfulness_reaches_the_demonstrator(tmp_path: Path) -> None:
    for name, forgetful in (("a", 0.0), ("b", 1.0)):
        start.train(dataclasses.replace(TINY, forgetful=forgetful), tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() != (tmp_path / "b.safetensors").read_bytes()


def test_training_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        start.train(TINY, tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    model = start.load(tmp_path / "a.safetensors", TINY)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_an_interrupted_training_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_SAVE_EVERY", 2)
    start.train(TINY, tmp_path / "whole.safetensors")

    def interrupt(step: int, loss: float) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start.train(TINY, tmp_path / "cut.safetensors", interrupt)
    steps: list[int] = []
    start.train(TINY, tmp_path / "cut.safetensors", lambda step, loss: steps.append(step))
    assert steps == [5, 6]
    assert (tmp_path / "cut.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert not (tmp_path / "cut.state").exists()


def test_a_cached_file_is_found_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUADS_CACHE", str(tmp_path))
    assert start.find(TINY) is None
    cached = tmp_path / f"start-{TINY.hash}.safetensors"
    start.train(TINY, cached)
    assert start.find(TINY) == cached


def test_a_file_cut_into_parts_is_found_and_read_as_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUADS_CACHE", str(tmp_path / "cache"))
    whole = tmp_path / f"start-{TINY.hash}.safetensors"
    start.train(TINY, whole)
    parts = start.cut(whole, tmp_path / "cache", limit=20_000)
    assert len(parts) > 2 and start.find(TINY) == tmp_path / "cache" / whole.name
    joined, expected = start.load(start.find(TINY) or whole, TINY), start.load(whole, TINY)
    assert all(torch.equal(value, joined.state_dict()[name]) for name, value in expected.state_dict().items())
    parts[1].unlink()
    assert start.find(TINY) is None  # a part that is missing is no start


def test_the_small_start_has_the_blocks_that_outliers_need() -> None:
    small = start.STARTS["small"]
    model = start.build(small)
    assert 16e6 < sum(parameter.numel() for parameter in model.parameters()) < 17e6
    assert small.hidden // 16 == 32


@pytest.mark.parametrize("task", ["gcd", "products"])
def test_a_start_of_another_task_is_another_file_and_learns_to_answer_it(tmp_path: Path, task: str) -> None:
    config = dataclasses.replace(TINY, task=task)
    assert config.hash != TINY.hash and config.describe()["demonstrator"] != TINY.describe()["demonstrator"]
    losses: list[float] = []
    start.train(
        dataclasses.replace(config, steps=30), tmp_path / "s.safetensors", lambda step, loss: losses.append(loss)
    )
    assert losses[-1] < losses[0]


def test_a_file_without_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "start.safetensors"
    start.train(TINY, path)
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"lacks tensor model\.norm\.weight of shape \(32,\)"):
        start.load(path, TINY)


def test_the_schedule_warms_up_stays_and_decays() -> None:
    config = StartConfig(steps=100, warmup=10, decay_from=0.6)
    values = [start.schedule(config, step) for step in range(100)]
    assert values[0] == 0.1 and values[9] == 1.0
    assert values[10:60] == [1.0] * 50
    assert values[80] == pytest.approx(0.5)
    assert values[99] == 0.05


def test_only_answers_carry_loss() -> None:
    tokenizer = character_tokenizer()
    ids, labels = start.encode(tokenizer, [("1+1=", "2"), ("10+2=", "12")])
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == ["1+1=2", "10+2=12"]
    assert labels[0].tolist() == [IGNORED] * 4 + tokenizer("2")["input_ids"] + [tokenizer.eos_token_id] + [IGNORED] * 2
