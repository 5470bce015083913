"""The settings of one verl job, under verl's own names: those of every job (verl.toml), and those of this one."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quads.suites.verl import Job, VerlOptions

VERSION = "0.9.1"  # the release whose schema the settings are written and tested against
LIBRARY = "quads.integrations.verl"
MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
WORDS = ("null", "true", "false", "nan", "inf")  # what Hydra does not read as strings
ENGINE = f"+{ROLLOUT}.engine_kwargs.vllm"  # an open dictionary: verl hands it to vLLM as it is


def settings(job: Job, options: VerlOptions, place: str) -> dict[str, Any]:
    """Every override of `job`, by dotted key; `place` is the folder of the rendered suite on the cluster."""
    home = f"{place}/{job.folder}"
    return {
        **_fixed(),
        **_data(job, options, place),
        **_sizes(job, options),
        **_correction(job),
        **_seeds(job),
        **_trainer(job, options, home),
        **_numerics(job, f"{home}/recipe.toml"),
    }


@lru_cache(maxsize=1)
def _fixed() -> dict[str, Any]:
    text = resources.files("quads").joinpath("suites", "verl.toml").read_text("utf-8")
    return dict(_flat(tomllib.loads(text)))


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _data(job: Job, options: VerlOptions, place: str) -> dict[str, Any]:
    files = {"train_files": options.train_files, "val_files": options.val_files}
    return {f"data.{key}": path if path.startswith(("/", "~")) else f"{place}/{path}" for key, path in files.items()}


def _sizes(job: Job, options: VerlOptions) -> dict[str, Any]:
    compare = job.cell.compare
    longest = options.max_prompt_tokens + compare.max_new_tokens
    return {
        "data.train_batch_size": compare.prompts,
        "data.max_prompt_length": options.max_prompt_tokens,
        "data.max_response_length": compare.max_new_tokens,
        f"{MODEL}.path": compare.model or options.model,
        f"{ACTOR}.optim.lr": compare.lr,
        f"{ACTOR}.ppo_mini_batch_size": compare.prompts // compare.minibatches,
        f"{ACTOR}.ppo_max_token_len_per_gpu": max(longest, 16384),
        f"{ROLLOUT}.n": compare.samples,
        f"{ROLLOUT}.tensor_model_parallel_size": options.tensor_parallel,
        f"{ROLLOUT}.max_model_len": longest,
    }


def _correction(job: Job) -> dict[str, Any]:
    """Truncated importance sampling a token, between the rollout's log-probabilities and the trainer's."""
    tis = job.cell.compare.tis
    where = "algorithm.rollout_correction"
    return {f"{where}.rollout_is": "token" if tis else None, f"{where}.rollout_is_threshold": tis or 2.0}


def _seeds(job: Job) -> dict[str, Any]:
    where = ("data.seed", f"{ACTOR}.data_loader_seed", f"{ACTOR}.fsdp_config.seed", f"{ROLLOUT}.seed")
    return dict.fromkeys(where, job.seed)


def _trainer(job: Job, options: VerlOptions, home: str) -> dict[str, Any]:
    compare = job.cell.compare
    trackers = ["console", "tensorboard"] + ([compare.report_to] if compare.report_to != "none" else [])
    return {
        "trainer.total_training_steps": compare.steps,
        "trainer.total_epochs": compare.steps,  # an upper bound: steps end the run
        "trainer.test_freq": compare.eval_every,
        "trainer.save_freq": compare.eval_every,
        "trainer.max_actor_ckpt_to_keep": 1,
        "trainer.nnodes": options.nodes,
        "trainer.n_gpus_per_node": options.gpus,
        "trainer.logger": trackers,
        "trainer.project_name": f"quads-{job.suite}",
        "trainer.experiment_name": job.folder.replace("/", "-"),
        "trainer.default_local_dir": f"{home}/checkpoints",
    }


def _numerics(job: Job, recipe: str) -> dict[str, Any]:
    """Where the recipe comes in: the vLLM plugin in the rollout, the FSDP2 engine of quads.integrations.verl."""
    given: dict[str, Any] = {}
    if (job.recipe.rollout_weights, job.recipe.rollout_activations) != ("bf16", "bf16"):
        quantization = {"quant_method": "quads", "recipe": recipe, "seed": job.seed}
        given[f"{ENGINE}.quantization"] = "quads"
        given[f"{ENGINE}.hf_overrides"] = {"quantization_config": quantization}
    if job.recipe.train_weights != "bf16":
        given[f"{MODEL}.external_lib"] = LIBRARY
        given[f"+{MODEL}.override_config.quads_recipe"] = recipe
    return given


def arguments(values: dict[str, Any]) -> list[str]:
    """`key=value` in Hydra's override grammar."""
    return [f"{key}={_value(value)}" for key, value in values.items()]


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_value, value)) + "]"
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z/][\w./-]*", value) and value.lower() not in WORDS
        return value if plain else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return repr(value)
