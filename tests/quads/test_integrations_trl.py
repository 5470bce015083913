"""The rollout function and callback, alone and inside a real GRPOTrainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quads.compare.characters import character_tokenizer
from quads.gap import token_logps
from quads.integrations.trl import GapCallback, QuadsRollout, end_tokens, prompt_ids, score
from quads.qat import prepare_qat
from quads.recipes import named
from quads.sampling import Completions
from tests.quads.tiny import tiny_model

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

PROMPTS = ["12+34=", "12+34=", "9-8=", "9-8="]


def _trainer_like(model: Any, temperature: float = 1.0) -> Any:
    accelerator = SimpleNamespace(unwrap_model=lambda m: m, autocast=torch.no_grad)
    args = SimpleNamespace(max_completion_length=4, temperature=temperature)
    return SimpleNamespace(
        model=model, accelerator=accelerator, args=args, num_generations=2, processing_class=character_tokenizer()
    )


def _roll(
    recipe: str, *, seed: int = 0, round: int = 0, qat: bool = False, prompts: list[str] = PROMPTS
) -> QuadsRollout:
    model = tiny_model()
    if qat:
        prepare_qat(model, named()[recipe])
    rollout = QuadsRollout(named()[recipe], seed=seed, round=round)
    rollout.result = rollout(prompts, _trainer_like(model))  # type: ignore[attr-defined]
    return rollout


def _measured(rollout: QuadsRollout) -> dict[str, float]:
    assert rollout.last is not None
    return rollout.last.gap


def test_the_gap_of_bf16_is_summation_order_and_that_of_nvfp4_is_not() -> None:
    assert _measured(_roll("bf16"))["gap/max"] < 2.0**-16
    assert _measured(_roll("nvfp4"))["gap/mean"] > 2.0**-10


def test_qat_removes_the_weight_share_of_the_gap_exactly_under_a_w4a16_rollout() -> None:
    assert _measured(_roll("w4a16", qat=True))["gap/max"] < 2.0**-16
    assert _measured(_roll("w4a16", qat=False))["gap/mean"] > 2.0**-10


def test_the_master_weights_are_untouched_by_a_rollout() -> None:
    model, before = tiny_model(), tiny_model().state_dict()
    QuadsRollout(named()["quads"])(PROMPTS, _trainer_like(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_round_and_seed_decide_the_samples() -> None:
    first = _roll("quads", seed=1, round=4)
    assert first.result == _roll("quads", seed=1, round=4).result  # type: ignore[attr-defined]
    assert first.result != _roll("quads", seed=1, round=5).result  # type: ignore[attr-defined]
    assert first.result != _roll("quads", seed=2, round=4).result  # type: ignore[attr-defined]
    assert first.round == 5


def test_equal_prompts_in_a_row_share_one_prefill_and_unequal_ones_are_sampled_alone() -> None:
    mixed = ["12+34=", "9-8=", "1+1=", "9-8="]
    rows = _roll("bf16", prompts=mixed).result["prompt_ids"]  # type: ignore[attr-defined]
    assert rows == [character_tokenizer()(prompt)["input_ids"] for prompt in mixed]


def test_the_score_is_the_trainers_log_probability_of_each_sampled_token() -> None:
    model, prompts = tiny_model(), [[5, 6], [7, 8, 9]]
    completions = Completions([[10, 11, 1], [12]], [[-1.0, -2.0, -3.0], [-4.0]])
    ratios = score(model, prompts, completions, pad=0).ratios
    by_hand = []
    for prompt, tokens, logps in zip(prompts, completions.tokens, completions.logps, strict=True):
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            own = token_logps(model(input_ids=ids).logits, ids)[0, len(prompt) - 1 :]
        by_hand += (own.double() - torch.tensor(logps).double()).tolist()
    assert torch.tensor(ratios) == pytest.approx(torch.tensor(by_hand), abs=2.0**-16)


def test_every_end_token_of_config_and_tokenizer_ends_a_completion() -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[7, 8]))
    assert set(end_tokens(model, SimpleNamespace(eos_token_id=1))) == {1, 7, 8}
    assert end_tokens(SimpleNamespace(), SimpleNamespace(eos_token_id=1)) == (1,)


def test_messages_go_through_the_chat_template() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    assert prompt_ids([[{"role": "user", "content": "1+2"}]], tokenizer) == [tokenizer("1+2=")["input_ids"]]


@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 0.9), ("top_k", 20), ("min_p", 0.1), ("repetition_penalty", 1.1)]
)
def test_an_option_that_the_rollout_would_leave_out_is_refused_by_name(name: str, value: float) -> None:
    trainer = SimpleNamespace(args=SimpleNamespace(**{"top_p": 1.0, "top_k": 0, "min_p": None, name: value}))
    with pytest.raises(ValueError, match=rf"GRPOConfig\.{name} is {value}"):
        QuadsRollout(named()["quads"])(["1+2="], trainer)


def test_a_grpo_trainer_logs_the_gap_and_trains(tmp_path: Path) -> None:
    recipe, model = named()["quads"], tiny_model()
    before = {name: value.clone() for name, value in model.named_parameters()}
    prepare_qat(model, recipe)
    rollout = QuadsRollout(recipe)
    args = trl.GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=4,
        learning_rate=1e-3,
        logging_steps=1,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        args=args,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1+2=", "3+4=", "5+6=", "7+8="]}),
        processing_class=character_tokenizer(),
        rollout_func=rollout,
        callbacks=[GapCallback(rollout)],
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "gap/mean" in entry and "loss" in entry]
    assert [entry["gap/mean"] for entry in logged] == [measured.gap["gap/mean"] for measured in rollout.history]
    assert len(logged) == 2
    assert all(entry["throughput/rollout_tokens_per_s"] > 0 for entry in logged)
    after = {name.replace("parametrizations.", "").replace(".original", ""): p for name, p in model.named_parameters()}
    assert any(not torch.equal(after[name], value) for name, value in before.items())
