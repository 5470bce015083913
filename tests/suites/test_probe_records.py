"""A record's numbers are those of its definitions, worked out here by hand."""

import math

import pytest
import torch

from quads.attribution.batch import pad
from quads.suites.probe_records import compare, kl
from quads.suites.probe_scoring import Scored

BATCH = pad([[1, 0, 1], [1, 1]], [1, 1])  # two counted tokens, then one


def scored(probabilities: list[list[float]], chosen: list[int], experts: list[list[int]]) -> Scored:
    full = torch.tensor(probabilities).log()
    return Scored(full, full[range(len(chosen)), chosen], torch.tensor(experts, dtype=torch.int16).unsqueeze(1))


REFERENCE = scored([[0.5, 0.5], [0.5, 0.5], [0.25, 0.75]], [0, 1, 1], [[0, 1], [0, 1], [0, 2]])
ARM = scored([[0.25, 0.75], [0.5, 0.5], [0.25, 0.75]], [0, 1, 1], [[0, 2], [0, 1], [0, 2]])


def test_numbers_by_hand() -> None:
    record = compare(ARM, REFERENCE, BATCH)
    gap, divergence = math.log(2), 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert record["probe/gap_mean"] == pytest.approx(gap / 3) and record["probe/gap_max"] == pytest.approx(gap)
    assert record["probe/kl"] == pytest.approx(divergence / 3)
    assert record["probe/k3"] == pytest.approx((0.5 + gap - 1) / 3)
    assert record["probe/router_flips"] == pytest.approx(1 / 3) and record["probe/tokens"] == 3
    assert record["probe/by_sequence"] == [pytest.approx(gap / 2, rel=1e-5), 0.0]
    assert record["probe/kl_by_sequence"] == [pytest.approx(divergence / 2, rel=1e-5), 0.0]


def test_equal_sides_are_exactly_zero() -> None:
    record = compare(ARM, ARM, BATCH)
    assert record["probe/gap_max"] == record["probe/kl"] == record["probe/k3"] == record["probe/router_flips"] == 0


def test_the_divergence_is_of_the_reference_and_never_negative() -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    p, q = logits.log_softmax(-1), logits.flip(0).log_softmax(-1)
    expected = torch.nn.functional.kl_div(q.double(), p.double(), reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(kl(p, q), expected)
    assert (kl(p, q) > -1e-6).all() and not torch.allclose(kl(p, q), kl(q, p))


def test_a_dense_model_has_no_flips() -> None:
    dense = Scored(ARM.full, ARM.logps, None)
    assert "probe/router_flips" not in compare(dense, dense, BATCH)


def test_a_log_probability_that_is_not_finite_is_refused() -> None:
    broken = Scored(ARM.full, ARM.logps * float("nan"), ARM.experts)
    with pytest.raises(ValueError, match="non-finite"):
        compare(broken, REFERENCE, BATCH)
