"""QuadsTrainer inside TRL's loop: whose gap it measures, what TIS weighs, and that R3 lines routing up with tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quads.compare.characters import character_tokenizer
from quads.compute import Arithmetic
from quads.integrations.trl import QuadsRollout
from quads.recipes import load
from quads.routing import UNRECORDED, as_routing, record_routing, routers
from tests.quads.tiny import tiny_model

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from quads.integrations.trl_trainer import QuadsTrainer  # noqa: E402

PROMPTS = ["1+2=", "33+44=", "5+666=", "7+8="]  # of several lengths: the trainer pads them on the left


def _trainer(
    folder: Path, *, recipe: str = "nvfp4", r3: bool = False, tis: float = 0.0, minibatches: int = 2, **kinds: Any
) -> Any:
    args = trl.GRPOConfig(
        output_dir=str(folder),
        max_steps=minibatches,
        per_device_train_batch_size=16 // minibatches,
        steps_per_generation=minibatches,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=5,
        learning_rate=1e-3,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        router_aux_loss_coef=0.0,
    )
    return kinds.get("kind", QuadsTrainer)(
        model=tiny_model(),
        args=args,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=character_tokenizer(),
        rollout_func=QuadsRollout(load(recipe), seed=3, routed=r3),
        tis=tis,
        arithmetic=Arithmetic(),
    )


class _Watched(QuadsTrainer):
    """Keeps every batch that it trains on, and the experts that the trainer's forward passes chose."""

    batches: list[dict[str, Tensor]]
    chosen: list[Tensor]
    recorded: Tensor | None = None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        if self.rollout.routing is not None:  # TRL's shuffle moves it with its rows
            batch["recorded"] = self.rollout.routing if self.recorded is None else self.recorded
        return batch

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        self.__dict__.setdefault("batches", []).append(dict(inputs))
        with record_routing(model) as recorder:
            loss = super()._compute_loss(model, inputs)
        rows = len(inputs["prompt_ids"])
        choices = torch.stack([recorder.routing(rows)[name] for name in routers(model)], dim=2)
        self.__dict__.setdefault("chosen", []).append(choices)
        return loss


def _tokens(batch: dict[str, Tensor]) -> Tensor:
    return torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)


def _agrees(batch: dict[str, Tensor], chosen: Tensor) -> bool:
    recorded = batch["routing"][:, : chosen.shape[1]].long()
    return bool(((recorded == chosen) | (recorded == UNRECORDED)).all())


def test_with_r3_the_trainer_chooses_the_rollouts_experts_in_every_minibatch(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, r3=True, kind=_Watched)
    trainer.train()
    assert len(trainer.batches) == 2
    for batch, chosen in zip(trainer.batches, trainer.chosen, strict=True):
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).bool()
        recorded = batch["routing"][:, : mask.shape[1], 0, 0] != UNRECORDED
        # Every token that the rollout fed to the model has a record: all but the last of each row.
        last = mask.long().cumsum(1) == mask.sum(1, keepdim=True)
        assert torch.equal(recorded, mask & ~(last & mask))
        assert _agrees(batch, chosen)


def test_without_r3_the_trainer_chooses_others_so_the_check_above_can_fail(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, kind=_Watched)
    trainer.rollout.routed = True  # recorded, and not replayed
    trainer._generate = lambda prompts: trl.GRPOTrainer._generate(trainer, prompts)
    trainer.train()
    pairs = zip(trainer.batches, trainer.chosen, strict=True)
    assert not all(_agrees({**batch, "routing": batch["recorded"]}, chosen) for batch, chosen in pairs)


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_a_misaligned_record_is_noticed(tmp_path: Path, dim: int) -> None:
    trainer = _trainer(tmp_path, r3=True, kind=_Watched)

    def generate(prompts: list[Any]) -> Any:
        generated = QuadsTrainer._generate(trainer, prompts)
        trainer.recorded = trainer._routing
        trainer._routing = trainer._routing.roll(1, dim)  # planted: another row's, or another token's, experts
        return generated

    trainer._generate = generate
    trainer.train()
    pairs = zip(trainer.batches, trainer.chosen, strict=True)
    assert not all(_agrees({**batch, "routing": batch["recorded"]}, chosen) for batch, chosen in pairs)


def test_the_gap_is_that_of_trls_own_log_probabilities_whether_it_computes_them_or_not(tmp_path: Path) -> None:
    gaps = []
    for minibatches in (1, 2):  # with one update a rollout TRL leaves the old log-probabilities out
        trainer = _trainer(tmp_path, minibatches=minibatches, kind=_Watched)
        trainer.train()
        old = torch.cat([b["old_per_token_logps"] for b in trainer.batches])
        sampled = torch.cat([b["sampling_per_token_logps"] for b in trainer.batches])
        mask = torch.cat([b["completion_mask"] for b in trainer.batches]).bool()
        by_hand = (old - sampled)[mask].abs().double().mean()
        assert trainer.rollout.last.gap["gap/mean"] == pytest.approx(float(by_hand), rel=1e-5)
        gaps.append(float(by_hand))
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-2) and gaps[0] > 2.0**-10


def test_tis_weighs_each_tokens_loss_as_trl_weighs_its_own(tmp_path: Path) -> None:
    plain = _trainer(tmp_path, kind=_Watched)
    plain.train()
    weighted = _trainer(tmp_path, tis=1.05, kind=_Watched)  # made after: a trainer seeds the shuffle as it is made
    weighted.train()
    batch, corrected = plain.batches[0], weighted.batches[0]
    ratio = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).exp().clamp(max=1.05)
    ratio = ratio.where(batch["completion_mask"].bool(), 1.0)
    assert float((ratio - 1).abs().max()) > 2.0**-10  # there is something to weigh
    assert torch.allclose(corrected["advantages"], batch["advantages"].unsqueeze(1) * ratio)
    # TRL's own mechanism, the loss times a ratio, on the same batch and weights of the model.
    model = tiny_model()
    plain.use_vllm = plain.vllm_importance_sampling_correction = True
    plain.model = weighted.model = model
    trl.trainer.utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    native = trl.GRPOTrainer._compute_loss(plain, model, {**batch, "importance_sampling_ratio": ratio})
    ours = trl.GRPOTrainer._compute_loss(weighted, model, corrected)
    assert float(ours) == pytest.approx(float(native), rel=1e-6)
    assert float(ours) != float(trl.GRPOTrainer._compute_loss(weighted, model, batch))
    assert weighted.corrected["correction/tis_capped"] > 0


def test_a_decode_record_lines_up_with_a_whole_pass_over_each_row() -> None:
    """In float32 the cached decode and the whole pass of one row choose alike: the layout alone decides."""
    from quads.sampling import sample

    model, prompts = tiny_model(), [[5, 9, 11], [7], [20, 21, 22, 23, 24]]
    ends = tuple(range(2, 24))
    options: dict[str, Any] = {"samples": 3, "max_new_tokens": 6, "eos": ends, "pad": 0}
    result = sample(model, prompts, routed=True, generator=torch.Generator().manual_seed(0), **options)
    assert result.routing is not None and len({len(row) for row in result.tokens}) > 1
    for row, tokens in enumerate(result.tokens):
        prompt = prompts[row // 3]
        with torch.no_grad(), record_routing(model) as recorder:
            model(torch.tensor([prompt + tokens]))
        first = 5 - len(prompt)
        mine = as_routing(model, result.routing[row : row + 1, first : first + len(prompt) + len(tokens) - 1])
        for name, chosen in recorder.routing(1).items():
            assert torch.equal(mine[name], chosen[:, :-1])
        assert (result.routing[row, :first] == UNRECORDED).all()
        assert (result.routing[row, first + len(prompt) + len(tokens) - 1 :] == UNRECORDED).all()
