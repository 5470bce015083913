"""TIS weights are truncated, detached importance ratios."""

import pytest
import torch

from quads.correction import tis_weights


def test_weights_are_ratios_cut_at_the_cap_and_one_outside_the_mask() -> None:
    trainer = torch.tensor([-1.0, -1.0, -3.0, -1.0], requires_grad=True)
    rollout = torch.tensor([-1.0, -3.0, -1.0, -9.0])
    weights = tis_weights(trainer, rollout, torch.tensor([1, 1, 1, 0]))
    assert not weights.requires_grad
    assert weights.tolist() == [1.0, 2.0, pytest.approx(torch.tensor(-2.0).exp().item()), 1.0]
    with pytest.raises(ValueError, match="cap = 0 must be above 0"):
        tis_weights(trainer, rollout, torch.ones(4), cap=0)
