"""A suite's rendered verl jobs, held to the schema of verl's own wheel."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from quads import recipes
from quads.errors import CannotRunHereError
from quads.suites import config, verl_settings
from quads.suites.config import Suite, SuiteError
from quads.suites.verl import VerlOptions, render
from tests.suites.verl_wheel import Schema, unpacked

SUITE = Suite(
    name="s",
    title="t",
    question="q",
    arms=("bf16", "fp8", "nvfp4", "qat", "quads", "quads:rac_ratio=0.25:rac_scope=token"),
    seeds=2,
    settings={"steps": 260, "prompts": 256, "samples": 16, "minibatches": 2, "lr": 1e-6, "max_new_tokens": 8192},
    corrections=("none", "tis"),
)


@pytest.fixture(scope="module")
def schema(tmp_path_factory: Any) -> Schema:
    pytest.importorskip("hydra", reason="needs hydra-core")
    return Schema(unpacked(tmp_path_factory.mktemp("wheel")))


def overrides(folder: Path) -> list[str]:
    """The arguments that run.sh gives to verl."""
    words = shlex.split((folder / "run.sh").read_text().partition("exec ")[2].replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "verl.trainer.main_ppo"] and words[-1] == "$@"
    return words[3:-1]


def values(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "job.yaml").read_text())


def composed(schema: Schema, folder: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(schema.compose(overrides(folder)))  # type: ignore[return-value]


def test_every_arm_correction_and_seed_is_a_job_that_verl_accepts(schema: Schema, tmp_path: Path) -> None:
    folders = render(SUITE, tmp_path)
    assert len(folders) == 6 * 2 * 2
    for folder in folders[::7]:
        schema.compose(overrides(folder))
        assert list(schema.wrong(values(folder))) == []


@pytest.mark.parametrize("name", [name for name in config.shipped() if config.load(name).arms])
def test_every_shipped_suite_renders_or_says_why_not(schema: Schema, name: str, tmp_path: Path) -> None:
    suite = config.load(name)
    cells = suite.cells(tmp_path)
    here = [cell.name for cell in cells if not (cell.compare.r3 or cell.compare.outliers)]
    for cell in cells:
        if cell.name not in here:
            with pytest.raises(CannotRunHereError, match=re.escape(f"cell {cell.name}, arm")):
                render(suite, tmp_path, variant=cell.name, seed=0)
    folders = [folder for cell in here for folder in render(suite, tmp_path, variant=cell, seed=0)]
    assert len(folders) == len(here) * len(suite.arms)
    assert [line for folder in folders for line in schema.wrong(values(folder))] == []
    for folder in folders[-1:]:
        schema.compose(overrides(folder))


@pytest.mark.parametrize("key", ["data.trian_batch_size", "actor_rollout_ref.actor.optim.lrr", "algorithm.gama"])
def test_a_misspelt_key_is_refused_by_verls_schema(
    schema: Schema, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hydra.errors import HydraException

    fixed = verl_settings._fixed()
    monkeypatch.setattr(verl_settings, "_fixed", lambda: {**fixed, key: 1})
    (folder,) = render(SUITE, tmp_path, arm="quads", variant="plain", seed=0)
    with pytest.raises(HydraException, match=key.rpartition(".")[2]):
        schema.compose(overrides(folder))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.actor.optim.lr", "1e-6"),
        ("actor_rollout_ref.rollout.n", 2.5),
        ("actor_rollout_ref.rollout.calculate_log_probs", "yes"),
        ("algorithm.rollout_correction.rollout_is", 1),
        ("data.shuffle", 1),
    ],
)
def test_a_value_of_the_wrong_type_is_seen(schema: Schema, key: str, value: Any) -> None:
    assert [line.split(" ")[0] for line in schema.wrong({key: value})] == [key]


def test_new_keys_go_into_dictionaries_that_verl_leaves_open(schema: Schema, tmp_path: Path) -> None:
    (folder,) = render(SUITE, tmp_path, arm="quads", variant="plain", seed=0)
    added = {key[1:].rpartition(".")[0] for key in values(folder) if key.startswith("+")}
    assert added == {"actor_rollout_ref.rollout.engine_kwargs.vllm", "actor_rollout_ref.model.override_config"}
    assert all(schema.open(key) for key in added)
    assert not schema.open("data")


def test_the_command_says_what_the_yaml_says(schema: Schema, tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    (folder,) = render(SUITE, tmp_path, arm="quads", variant="plain", seed=1)
    found = schema.compose(overrides(folder))
    for key, value in values(folder).items():
        assert OmegaConf.select(found, key.removeprefix("+")) == value


def test_the_recipe_reaches_both_sides(schema: Schema, tmp_path: Path) -> None:
    (folder,) = render(SUITE, tmp_path, arm=SUITE.arms[-1], variant="plain", seed=1)
    job = composed(schema, folder)["actor_rollout_ref"]
    engine = job["rollout"]["engine_kwargs"]["vllm"]
    path = job["model"]["override_config"]["quads_recipe"]
    assert engine["quantization"] == "quads"
    assert engine["hf_overrides"]["quantization_config"] == {"quant_method": "quads", "recipe": path, "seed": 1}
    assert recipes.load(path) == recipes.load(SUITE.arms[-1])
    assert job["model"]["external_lib"] == "quads.integrations.verl"
    assert job["rollout"]["quantization"] is None  # verl's own switch knows no quads


def test_an_arm_that_trains_in_bf16_keeps_verls_engine(schema: Schema, tmp_path: Path) -> None:
    (naive,) = render(SUITE, tmp_path, arm="nvfp4", variant="plain", seed=0)
    (plain,) = render(SUITE, tmp_path, arm="bf16", variant="plain", seed=0)
    assert composed(schema, naive)["actor_rollout_ref"]["model"]["external_lib"] is None
    assert composed(schema, naive)["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"]["quantization"] == "quads"
    assert composed(schema, plain)["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"] == {}


def test_the_suites_numbers_arrive_under_verls_names(schema: Schema, tmp_path: Path) -> None:
    (folder,) = render(SUITE, tmp_path, arm="quads", variant="plain+tis", seed=1)
    job = composed(schema, folder)
    actor, rollout = job["actor_rollout_ref"]["actor"], job["actor_rollout_ref"]["rollout"]
    assert (job["data"]["train_batch_size"], actor["ppo_mini_batch_size"], rollout["n"]) == (256, 128, 16)
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"], actor["use_kl_loss"]) == (0.2, 0.28, False)
    assert (actor["optim"]["lr"], job["trainer"]["total_training_steps"]) == (1e-6, 260)
    correction = job["algorithm"]["rollout_correction"]
    assert (correction["rollout_is"], correction["rollout_is_threshold"]) == ("token", 2.0)
    assert (job["data"]["seed"], rollout["seed"], actor["data_loader_seed"]) == (1, 1, 1)
    (off,) = render(SUITE, tmp_path, arm="quads", variant="plain", seed=1)
    assert composed(schema, off)["algorithm"]["rollout_correction"]["rollout_is"] is None


def test_both_sides_hold_the_dtype_that_q_sees(schema: Schema, tmp_path: Path) -> None:
    (folder,) = render(SUITE, tmp_path, arm="quads", variant="plain", seed=0)
    job = composed(schema, folder)["actor_rollout_ref"]
    assert (job["actor"]["strategy"], job["actor"]["fsdp_config"]["dtype"], job["rollout"]["dtype"]) == (
        "fsdp2",
        "bfloat16",
        "bfloat16",
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"settings": {"r3": True}}, r"verl 0.9.1 replays routing \(R3\) under Megatron and VeOmni only"),
        ({"settings": {"outliers": "8x16"}}, "outlier channels are planted"),
        ({"arms": ("quads:rac_scope=tile",)}, "'tile' of fused experts on a CPU only"),
    ],
)
def test_what_verl_cannot_do_is_an_error_and_nothing_is_written(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    suite = dataclasses.replace(SUITE, corrections=("none",), **changes)
    with pytest.raises(CannotRunHereError, match=why):
        render(suite, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_suite_without_runs_says_so(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="suite s only probes: it has no runs to render"):
        render(dataclasses.replace(SUITE, arms=()), tmp_path)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"arm": "qad"}, "the suite has no arm 'qad'"),
        ({"variant": "hot"}, r"the suite has no variant 'hot' \(it has plain, plain\+tis\)"),
        ({"seed": 2}, r"the suite has no seed '2' \(it has 0, 1\)"),
    ],
)
def test_a_wrong_choice_is_named(given: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=why):
        render(SUITE, tmp_path, **given)


def test_options_that_cannot_be_are_named() -> None:
    with pytest.raises(SuiteError, match="'gpus' is 0"):
        VerlOptions(gpus=0)
    with pytest.raises(SuiteError, match="'nodes' is 'two', not a number from 1 up"):
        VerlOptions(nodes="two")  # type: ignore[arg-type]
    with pytest.raises(SuiteError, match="'tensor_parallel' is 3: it must divide 8 GPUs"):
        VerlOptions(tensor_parallel=3)
    suite = dataclasses.replace(SUITE, settings={"prompts": 9, "samples": 4, "minibatches": 2})
    with pytest.raises(SuiteError, match="minibatches = 2 does not divide prompts = 9"):
        render(suite, Path("unused"))


def test_a_job_can_be_written_for_another_place(tmp_path: Path) -> None:
    (folder,) = render(SUITE, tmp_path, arm="quads", variant="plain", seed=0, options=VerlOptions(place="/shared/q"))
    given = values(folder)
    assert given["data.train_files"] == "/shared/q/data/dapo-math-17k.parquet"
    assert given["trainer.default_local_dir"] == "/shared/q/plain/quads-seed0/checkpoints"
    assert str(tmp_path) not in (folder / "run.sh").read_text()


def test_paths_with_spaces_and_quotes_survive_shell_and_hydra(schema: Schema, tmp_path: Path) -> None:
    odd = "/data/it's here, {a}=$HOME/train set.parquet"
    (folder,) = render(
        SUITE, tmp_path, arm="quads", variant="plain", seed=0, options=VerlOptions(train_files=odd, model="null")
    )
    job = composed(schema, folder)
    assert job["data"]["train_files"] == odd
    assert job["actor_rollout_ref"]["model"]["path"] == "null"


def test_the_folder_reads_on_its_own(tmp_path: Path) -> None:
    (folder,) = render(SUITE, tmp_path, arm="quads", variant="plain", seed=0)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "job.yaml", "recipe.toml", "run.sh"]
    assert os.access(folder / "run.sh", os.X_OK)
    text = (folder / "README.md").read_text()
    assert text.startswith("# s: plain, quads, seed 0\n")
    assert "verl[verl-core]==0.9.1" in text and "mean@16" in text


def test_the_readmes_data_preparation_keeps_one_row_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    (folder,) = render(SUITE, tmp_path / "out", arm="quads", variant="plain", seed=0)
    (code,) = re.findall(r"(?:^    .*\n)+", (folder / "README.md").read_text().partition("## Data")[2], re.MULTILINE)
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("dapo-math-17k", "aime-2024"):
        rows = [{"prompt": [{"role": "user", "content": f"question {i % 3}"}], "extra_info": i} for i in range(9)]
        pandas.DataFrame(rows).to_parquet(f"{name}.parquet")
    exec(textwrap.dedent(code), {})
    for name in ("dapo-math-17k", "aime-2024"):
        assert list(pandas.read_parquet(f"data/{name}.parquet").extra_info) == [0, 1, 2]
