"""Scoring gives each counted token its own log-probability, whatever stands beside it."""

import pytest
import torch

from quads.attribution.batch import TokenBatch, pad
from quads.gap import token_logps
from quads.suites import probe_scoring
from quads.suites.probe_numerics import BF16, Numerics, arm
from quads.suites.probe_records import compare
from quads.suites.probe_scoring import Scored, decode, prefill
from tests.quads.tiny import tiny_model, tokens

PROMPTS = [3, 5, 4, 3]
TOTALS = [9, 6, 12, 7]
ROWS = [tokens(1, total, seed=total)[0].tolist() for total in TOTALS]
BATCH = pad(ROWS, PROMPTS)
PLAIN = Numerics("rollout", BF16)


def score(scorer, numerics: Numerics = PLAIN, batch: TokenBatch = BATCH, family: str = "qwen3_moe") -> Scored:
    model = tiny_model(family)
    quantized = numerics.modules(model)
    with numerics.entered(model):
        return scorer(model, batch, quantized)


@pytest.mark.parametrize("scorer", [prefill, decode])
@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_a_sequence_scores_in_a_batch_as_it_does_alone(scorer, family: str) -> None:
    model, parts = tiny_model(family), []
    for row, prompt in zip(ROWS, PROMPTS, strict=True):
        ids = torch.tensor([row])
        with torch.no_grad():
            parts.append(token_logps(model(ids).logits, ids)[0, prompt - 1 :])
    scored = score(scorer, family=family)
    torch.testing.assert_close(scored.logps, torch.cat(parts), rtol=0, atol=1e-5)
    torch.testing.assert_close(scored.full.exp().sum(-1), torch.ones(BATCH.count))
    assert (scored.experts is None) == (family == "llama")


def test_decode_and_prefill_agree_and_report_in_one_order() -> None:
    whole, steps = score(prefill), score(decode)
    torch.testing.assert_close(whole.full, steps.full, rtol=0, atol=1e-5)
    assert whole.experts is not None and steps.experts is not None
    assert torch.equal(whole.experts, steps.experts) and whole.experts.shape == (BATCH.count, 2, 2)


def test_a_shifted_alignment_is_noticed() -> None:
    plain = score(prefill)
    shifted = Scored(plain.full, plain.logps.roll(1), plain.experts)
    assert compare(plain, plain, BATCH)["probe/gap_mean"] == 0
    assert compare(shifted, plain, BATCH)["probe/gap_mean"] > 0.1


def test_prompts_do_not_count() -> None:
    assert score(prefill).logps.shape == (sum(TOTALS) - sum(PROMPTS),)


@pytest.mark.parametrize("name", ["quads", "quads:rac_scope=static", "nvfp4:activation_outer=tensor"])
def test_padding_takes_no_part_in_what_rows_share(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    same = pad([row[:6] for row in ROWS], PROMPTS)
    wider = TokenBatch(*(torch.nn.functional.pad(part, (0, 40)) for part in (same.tokens, same.real, same.counted)))
    without, with_padding = (score(prefill, arm(name), batch) for batch in (same, wider))
    torch.testing.assert_close(without.full, with_padding.full, rtol=0, atol=2e-5)
    monkeypatch.setattr(probe_scoring, "_silenced", lambda modules, real: torch.no_grad())
    loud = score(prefill, arm(name), wider)
    if name != "nvfp4:activation_outer=tensor":  # padding of token 0 need not hold the largest activation
        assert float((loud.full - without.full).abs().max()) > 1e-4


def test_a_batch_selection_depends_on_how_tokens_meet() -> None:
    """Prefill selects over all tokens at once, decode over one position: only the shared scope can tell."""
    for name, equal in (("nvfp4", True), ("quads:rac_scope=token", True), ("quads", False)):
        whole, steps = score(prefill, arm(name)), score(decode, arm(name))
        assert torch.allclose(whole.full, steps.full, rtol=0, atol=1e-5) == equal, name


def test_many_sequences_go_through_in_several_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = score(prefill)
    monkeypatch.setattr(probe_scoring, "FORWARD_TOKENS", 24)
    parts = score(prefill)
    torch.testing.assert_close(parts.full, whole.full, rtol=0, atol=1e-5)
    assert parts.experts is not None and whole.experts is not None and torch.equal(parts.experts, whole.experts)
