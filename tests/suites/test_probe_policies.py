"""Outlier variants keep the function and move what the quantiser sees."""

import pytest
import torch

from quads.suites.config import SuiteError
from quads.suites.probe_policies import check_outliers, stressed
from tests.quads.tiny import tiny_model, tokens

CPU = torch.device("cpu")


@pytest.mark.parametrize("outliers", ["1x4", "2x16", "4x32"])  # 4 of 4 blocks at a hidden size of 64
def test_outliers_change_the_weights_and_not_one_bit_of_the_function(outliers: str) -> None:
    model = tiny_model()
    planted = stressed(model, outliers, CPU)
    with torch.no_grad():
        assert torch.equal(planted(tokens()).logits, model(tokens()).logits)
    channels, scale = (int(part) for part in outliers.split("x"))
    ratio = (
        planted.model.layers[0].post_attention_layernorm.weight / model.model.layers[0].post_attention_layernorm.weight
    )
    assert int((ratio == scale).sum()) == channels and int((ratio == 1).sum()) == 64 - channels


def test_no_outliers_is_an_equal_copy() -> None:
    model = tiny_model()
    copied = stressed(model, "", CPU)
    assert copied is not model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copied.parameters(), strict=True))


def test_every_block_can_hold_an_outlier() -> None:
    planted = check_outliers("32x8")
    assert planted is not None
    assert int((planted.scales(512).reshape(32, 16) == 8).any(1).sum()) == 32


@pytest.mark.parametrize("outliers", ["8", "x8", "8x", "8x1", "8x12", "8x0", "ax8", "8x-4", "8x1.5"])
def test_a_malformed_variant_is_one_line(outliers: str) -> None:
    with pytest.raises(SuiteError, match=f"probe outliers '{outliers}'") as caught:
        check_outliers(outliers)
    assert "\n" not in str(caught.value)
