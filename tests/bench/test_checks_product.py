"""The layers that are checked before any is timed go every way that a layer can go on Hopper."""

from __future__ import annotations

from quads.bench import compiled
from quads.bench.checks_product import LAYER, LAYER_TOKENS
from quads.kernels import moe


def test_checked_layers_go_every_way_in_both_products() -> None:
    for n, k in ((2 * LAYER.inner, LAYER.hidden), (LAYER.hidden, LAYER.inner)):
        weight = compiled.shape_of(LAYER.experts, n, k)
        ways = {moe.choose(tokens * LAYER.top_k, weight) for tokens in LAYER_TOKENS}
        assert ways == {"decode", "grouped", "prefill"}
