"""The gap meter's numbers, checked against formulas written out, and blind to padding and batching."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quads.gap import GapMeter, mean_interval, token_logps

TRAINER = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.5, 0.0]])
ROLLOUT = torch.tensor([[-1.5, -2.0, -2.0], [-0.25, -1.5, -9.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
R = np.array([0.5, 0.0, -1.0, -0.25, 0.0])


def meter() -> GapMeter:
    result = GapMeter()
    result.update(TRAINER, ROLLOUT, MASK)
    return result


def test_statistics_equal_their_formulas_over_unmasked_tokens() -> None:
    s = meter().summary()
    w = np.exp(R)
    assert s["gap/tokens"] == 5
    assert s["gap/mean"] == pytest.approx(1.75 / 5, rel=1e-12)
    assert s["gap/max"] == 1.0 and s["gap/p50"] == 0.25
    assert s["gap/k3"] == pytest.approx(np.mean(np.exp(R) - R - 1), rel=1e-12)
    assert s["gap/k3_reverse"] == pytest.approx(np.mean(np.exp(-R) + R - 1), rel=1e-12)
    assert s["gap/ess"] == pytest.approx(w.sum() ** 2 / (5 * (w**2).sum()), rel=1e-12)


def test_aliases_agree_with_the_definitions_of_their_owners() -> None:
    a = meter().aliases()
    p = np.abs(np.exp([-1, -2, -3, -0.5, -1.5]) - np.exp([-1.5, -2, -2, -0.25, -1.5]))
    assert a["token_mult_prob_error"] == pytest.approx(np.mean(np.exp(np.abs(R))))
    assert a["training/rollout_probs_diff_mean"] == pytest.approx(p.mean())
    assert a["training/rollout_probs_diff_std"] == pytest.approx(p.std(ddof=1))
    assert a["rollout_corr/kl"] == pytest.approx(-R.mean())
    assert a["sampling/importance_sampling_ratio/max"] == pytest.approx(np.exp(0.5))
    assert a["gen_kl_error"] == a["rollout_corr/k3_kl"] == meter().summary()["gap/k3"]


@given(st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0), st.booleans()), min_size=1, max_size=30), st.randoms())
def test_neither_padding_nor_batching_changes_a_statistic(rows: list, random) -> None:
    trainer, rollout, mask = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(3))
    whole, parts, dense = GapMeter(), GapMeter(), GapMeter()
    whole.update(trainer, rollout, mask.bool())
    cut = random.randint(0, len(rows))
    for piece in (slice(0, cut), slice(cut, None)):
        parts.update(trainer[piece], rollout[piece], mask[piece].bool())
    keep = mask.bool()
    dense.update(trainer[keep], rollout[keep], torch.ones(int(keep.sum()), dtype=torch.bool))
    assert whole.summary() == parts.summary() == dense.summary()


def test_garbage_under_the_mask_does_not_count_and_in_the_open_is_refused() -> None:
    bad = TRAINER.clone()
    bad[1, 2] = float("nan")
    result = GapMeter()
    result.update(bad, ROLLOUT, MASK)
    assert result.summary() == meter().summary()
    bad[0, 0] = float("nan")
    with pytest.raises(ValueError, match="trainer log-probabilities hold 1 non-finite"):
        result.update(bad, ROLLOUT, MASK)
    with pytest.raises(ValueError, match="must be equal"):
        result.update(TRAINER, ROLLOUT[:, :2], MASK)


def test_router_flips_count_sets_not_orders() -> None:
    result = meter()
    a = torch.tensor([[[0, 1], [2, 3], [0, 1]]])
    b = torch.tensor([[[1, 0], [2, 1], [3, 3]]])
    result.update_routing(a, b, torch.tensor([[1, 1, 0]]))
    assert result.summary()["gap/router_flips"] == 0.5


def test_an_empty_meter_reports_no_statistic() -> None:
    assert GapMeter().summary() == {"gap/tokens": 0}
    assert GapMeter().aliases() == {}


def test_the_interval_of_a_mean_covers_it_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = sum(low <= 1.0 <= high for low, high in (mean_interval(rng.exponential(size=60)) for _ in range(100)))
    assert 85 <= hits <= 100
    assert mean_interval(np.array([2.0, 2.0])) == (2.0, 2.0)
    assert np.isnan(mean_interval(np.array([1.0]))).all()


def test_token_logps_are_the_log_softmax_of_the_next_token() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(1))
    expected = (logits / 0.5).log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(token_logps(logits, tokens, 0.5), expected, rtol=0, atol=1e-5)
